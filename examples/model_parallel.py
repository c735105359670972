"""One model over several processes, divided between its layers, inside them, and both: the path
stays the same."""

import dure

task = dure.load_task("digits")
systems = [
    (dure.SingleWorker(), 1),
    (dure.Pipeline(microbatches=4, schedule="1f1b"), 2),
    (dure.TensorParallel(), 2),
    (dure.Parallel(dure.Mesh(pipeline=2, tensor=2)), 4),
]

for strategy, ranks in systems:
    run = dure.train(task, strategy, dure.Processes(ranks), dure.Stop(epochs=2))
    sent = run.summary["bytes_sent_per_worker"] / run.summary["steps"] / 1e3
    print(
        f"{run.label:<34} test loss {run.summary['test_loss']:.6f}, {sent:3.0f} kB sent by a "
        f"worker in a step"
    )
