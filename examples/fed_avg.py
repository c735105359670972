"""Federated averaging over 20 clients who never show their data: when each has all digits, and when
each has two."""

import dure

task = dure.load_task("digits", lr=0.1)
stop = dure.Stop(rounds=5)

for partition in (dure.IID(), dure.LabelShards(2)):
    strategy = dure.FedAvg(
        clients=20, fraction=0.25, local_epochs=5, batch_size=10, partition=partition
    )
    run = dure.train(task, strategy, stop=stop)
    curve = [f"{evaluation.metrics['test_accuracy']:.2f}" for evaluation in run.history.evaluations]
    print(f"{run.label}: test accuracy by round {' '.join(curve)}")
    print(f"  a client sent {run.summary['bytes_sent_per_worker'] / 1e3:.0f} kB on average")
