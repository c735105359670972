"""Ranks that train apart and average their weights: how rarely do they have to talk?"""

import dure

task = dure.load_task("digits")
stop = dure.Stop(epochs=6)

for strategy in (
    dure.DataParallel(),
    dure.LocalSGD(period=16),
    dure.DiLoCo(period=20, outer_momentum=0.5),
    dure.ADMM(rho=0.1),
    dure.ParallelSGD(),
):
    run = dure.train(task, strategy, dure.Processes(2), stop)
    sent = run.summary["bytes_sent_per_worker"] / 1e6
    print(
        f"{run.label:<28} test accuracy {run.summary['test_accuracy']:.3f}, {sent:5.1f} MB sent by "
        f"a worker"
    )
