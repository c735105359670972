"""Pipeline parallelism: a model is traced, cut into stages, scheduled, and run by micro-batches.

    `trace`, `side_effects`, `aliasing`           the model as a list of operations, and side
                                                  effects that such a list must not lose
    `leaf_modules`, `opaque_modules`, `patching`  modules that cannot be traced, each as a single
                                                  operation
    `observation`, `layer_drop`                   the same, found by running the model; also blocks
                                                  that LayerDrop skips
    `balance`, `cut`, `program`                   the positions of the cuts, the model that is cut,
                                                  and the operations of a stage
    `single_stage`                                a model in a single stage
    `schedule`, `builders`, `zero_bubble_v`       the order in which ranks compute, as data
    `validate`, `simulate`, `gantt`               whether a schedule can run, how long it takes, and
                                                  its picture
    `stage`, `split_backward`, `rng`              execution of a stage, separate weight gradients,
                                                  random numbers
    `runtime`, `evaluation`                       a rank that follows its list, in training and in
                                                  evaluation

The strategy for `dure.train` is `dure.parallel.mesh.pipeline`.
"""
