"""Twenty clients, some of them slow and some of them liars: who is waited for, and whose updates
count."""

import dure

task = dure.load_task("digits")
options = {"clients": 20, "fraction": 0.5, "local_epochs": 2}

for strategy in (dure.FedAvg(**options), dure.FedAsync(**options)):
    world = dure.Simulated(devices="stragglers:0.2:10")
    stop = dure.Stop(rounds=4 if strategy.name == "fed-avg" else 40)
    run = dure.train(task, strategy, world, stop, evaluate_every=4)
    _, seconds = run.history.series("virtual_seconds")
    print(
        f"{strategy.name}: test accuracy {run.summary['test_accuracy']:.2f} after "
        f"{seconds[-1]:.0f} virtual seconds"
    )

for rule in ("mean", "median"):
    world = dure.Simulated(attack="sign-flip:5", attackers=4)
    run = dure.train(
        task, dure.FedAvg(aggregate=rule, **options), world, dure.Stop(rounds=4), evaluate_every=4
    )
    print(f"four liars, {rule}: test accuracy {run.summary['test_accuracy']:.2f}")
