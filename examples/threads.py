"""One machine, every core: a mini-batch per core, layers per core, and updates without locks. What
the master did."""

import dure

task = dure.load_task("digits", lr=0.3)
stop = dure.Stop(epochs=3)

ways = {
    "alone": (dure.SingleWorker(batch_size=64), dure.Processes(1)),
    "a mini-batch per core": (dure.DataParallel(batch_size=64), dure.Threads(2)),
    "layers per core": (dure.LayersPerCore(batch_size=64, microbatches=4), dure.Threads(2)),
    "without locks": (dure.Hogwild(batch_size=64), dure.Threads(2)),
}
for name, (strategy, world) in ways.items():
    run = dure.train(task, strategy, world, stop)
    print(
        f"{name}: accuracy {run.summary['test_accuracy']:.3f} after {run.summary['seconds']:.2f} s"
    )
    for worker in run.summary["per_worker"]:
        shares = [worker[f"{kind}_seconds"] for kind in ("compute", "communication", "idle")]
        print(f"  {worker['name']}: " + ", ".join(f"{1000 * share:.0f} ms" for share in shares))
