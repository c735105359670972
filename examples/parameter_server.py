"""Servers hold the weights, workers push gradients: how long do they wait for one that is slow?

The first run has real processes; the others are under a virtual clock, where one step in five takes
five times longer.
"""

import dure

task = dure.load_task("digits")
stop = dure.Stop(epochs=3)

strategy = dure.ParameterServer(servers=2, workers=2, replicas=1)
run = dure.train(task, strategy, stop=stop)
print(f"{run.label}: test accuracy {run.summary['test_accuracy']:.3f}")

world = dure.Simulated(devices="jitter:0.2:5:100:100:100", server_mbit=1000)
for staleness in (0, 4, None):
    strategy = dure.ParameterServer(servers=1, workers=4, staleness=staleness)
    run = dure.train(task, strategy, world, stop)
    seconds = run.summary["numbers"]["virtual_seconds"]
    waited = run.summary["numbers"]["waiting"]
    print(
        f"{run.label}: test accuracy {run.summary['test_accuracy']:.3f} after {seconds:.1f} "
        f"virtual seconds, {waited:.0%} of the last round's time spent waiting"
    )
