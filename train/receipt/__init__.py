"""Receipts: what made a run, in one file, and what re-running it shows.

outputs/<run>/receipt.json is written at the start, at each checkpoint and at the end. Its keys (schema 2):

    schema         2
    run            the name of the run's folder
    config         the resolved configuration, and `places`: where each given key was said
    data           what the data are known by: names, sizes and ends of files, a revision of the Hub, classes, tokenizer, samples
    lanes, steps   how many a step has, and how many steps the run is long
    environments   code (commit, diff, digest), versions, devices, CPU, accelerate settings, variables: a different one each
    starts         one for each time that the command was typed: from which step, when, in which environment
    trace          [step, loss, gradient norm, samples], at logged steps; `samples` is a rolling digest of all that the model was
                   shown until then, in whichever order the processes were given it
    checkpoints    {step, weights_sha256}
    result         the summary: status, step, seconds, weights_sha256, metrics
    sha256         of all the rest, so that a truncated or edited receipt is noticed
"""
