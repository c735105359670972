"""Gradient descent and stochastic gradient descent on the same task: one takes a step an epoch, the
other many."""

import dure

task = dure.load_task("digits")
for batch_size in (None, 64):
    run = dure.train(task, dure.SingleWorker(batch_size=batch_size), stop=dure.Stop(epochs=5))
    summary = run.summary
    print(
        f"{run.label:<17} {summary['steps']:3d} steps  loss {summary['train_loss']:.3f}  "
        f"test accuracy {summary['test_accuracy']:.3f}"
    )
