"""Two ranks share each batch, with two all-reduces: the same model as one worker, at another cost
on the network."""

import dure

task = dure.load_task("digits")
stop = dure.Stop(epochs=3)

alone = dure.train(task, dure.SingleWorker(batch_size=64), stop=stop)
print(f"{alone.label}: test loss {alone.summary['test_loss']:.6f}")

for algorithm in ("ring", "master"):
    run = dure.train(
        task, dure.DataParallel(batch_size=64, all_reduce=algorithm), dure.Processes(2), stop
    )
    sent = ", ".join(
        f"{rank['name']} sent {rank['bytes_sent'] / 1e6:.1f} MB"
        for rank in run.summary["per_worker"]
    )
    print(f"{run.label}: test loss {run.summary['test_loss']:.6f}, {sent}")
