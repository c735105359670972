"""Three clinics keep pictures and labels to themselves: how well does one model do, and what leaks?

With two cuts the clinics have the beginning and the end of the model, and the server the middle.
Noise on the gradients guards labels there. In the last run each clinic keeps a head of its own.
"""

import dure

task = dure.load_task("digits")
stop = dure.Stop(rounds=5)
clinics = {"cut": ("1", "2"), "clients": 3, "batch_size": 32}

for defence in ("none", "isotropic:1"):
    strategy = dure.SplitLearning(**clinics, defence=defence, measure_leaks=True)
    run = dure.train(task, strategy, stop=stop)
    leaks = run.summary["numbers"]
    print(f"defence {defence}: test accuracy {run.summary['test_accuracy']:.3f}; AUC of labels")
    print(f"  guessed from gradients {leaks['direction_leak_auc']:.3f}")
    print(f"  and from what leaves the heads {leaks['cluster_leak_auc']:.3f}")

strategy = dure.SplitLearning(**clinics, personal_heads=True, held_out=0.2)
run = dure.train(task, strategy, stop=stop)
print(f"heads of their own: accuracy {run.summary['personal_accuracy']:.3f} on held-out pictures")
