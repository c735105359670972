"""Pipeline parallelism: a model is traced, cut into stages, scheduled, and run by micro-batches.

    trace, unseen, memory     the model as a list of operations, and what such a list must not lose
    whole, untraced, stand_in modules that cannot be traced, each as one operation;
    observed, choosing        found by running the model, also blocks that LayerDrop leaves out
    balance, cut, program     where to cut, the model that is cut, and what a stage computes;
                              uncut is a model in one stage
    schedule, builders        who computes what when, as data; zero_bubble_v is one of the builders
    validate, simulate, draw  whether a schedule can run, how long it takes, and its picture
    stage, apart, draws       a stage at work, gradients of weights apart, and random numbers
    runtime, evaluation       a rank that follows its list, in training and in evaluation

The strategy that does so in `dure.train` is `dure.parallel.mesh.pipeline`.
"""
