"""Parts of the refusals' texts, and what they mean in the documentation's table."""

from __future__ import annotations

NOT_YIELDED = "samples that the private loader yielded"
EARLIER_BATCH = "samples of an earlier one"
STILL_WAITING = "while gradients of an earlier one are pending"
SECOND_STEP = "a second call for the same samples"
ONE_ITERATION = "one iteration at a time"
LEFT_OUT = "a batch left out after its forward pass"
NO_RECORD = "rows that belong to no record"
UNEVEN = "more rows of some records than of others"
BESIDE_SAMPLES = "made otherwise, beside samples"
COLLATED_ROWS = "if its first dimension holds several rows of each record, pass views="
COLLATED_VALUES = "changed when one was replaced"
LISTED_AGAIN = "expected each record listed once"
OWN_PLAN = "draws its own batches"
DRAWN_MORE_OFTEN = "larger epsilon than is certified"
TRAINED = "no trained tensor besides the parameters"
OUTSIDE_GRADIENT = "no ordinary gradient on any parameter"
OTHER_OUTPUTS = "other outputs after other samples of the batch were replaced"
OTHER_GRADIENTS = "gradients in the rows of other samples"
PIECES = "a backward pass of an earlier piece"
PADDED = "shapes that depend on the records of the batch"
TRACE = "leave no trace of the samples in the module"
CONTENTS = "contents that only engine.public(), load_state_dict() or a count changes"
WRITTEN = "samples written into it"
REMADE = "another loader made from its batch sampler"
COPIED = "a copy or a pickle of it"
SECOND_ORDER = "create_graph=True: expected one backward pass"
PARAMETER_TERM = "with a term of the parameters"
NO_HOOKS = "a use outside the module's forward pass"
FOREIGN_GRADIENT = "uses a tensor with a gradient that is no output of the private module"
FOREIGN_PARAMETERS = "parameters of the module only"

GENERATOR = "large tensors and generators that a forward pass leaves as they are"
STATISTICS = "no running statistics of private samples outside the private module"
SETTING = "expected a number that does not depend on the samples"

WORDS = {
    GENERATOR: "a generator that goes on",
    STATISTICS: "running statistics in another model",
    NOT_YIELDED: "tensors that the private loader did not yield",
    EARLIER_BATCH: "samples of an earlier batch",
    STILL_WAITING: "a new batch before the step of the last one",
    SECOND_STEP: "two steps for one batch",
    ONE_ITERATION: "two iterations over the loader at once",
    LEFT_OUT: "a batch without a step",
    NO_RECORD: "rows of no record beside those of records",
    UNEVEN: "more rows of some records than of others",
    BESIDE_SAMPLES: "a tensor of another origin beside samples",
    COLLATED_ROWS: "a `collate_fn` that makes another number of rows",
    PIECES: "pieces of a batch with one backward pass for all",
    PADDED: "shapes that follow the longest record",
    COLLATED_VALUES: "a `collate_fn` that mixes records",
    LISTED_AGAIN: "a record listed several times",
    OWN_PLAN: "a sampler with a plan of its own",
    DRAWN_MORE_OFTEN: "records that are drawn more often than others",
    TRAINED: "a parameter outside the private module",
    OUTSIDE_GRADIENT: "a gradient that was not clipped",
    OTHER_OUTPUTS: "outputs that depend on other samples",
    OTHER_GRADIENTS: "gradients that reach other samples",
    TRACE: "state that depends on the samples",
    CONTENTS: "state that was written between checks",
    REMADE: "another loader, made of the private one's parts",
    COPIED: "a copy of the private loader",
    SECOND_ORDER: "a derivative of gradients",
    PARAMETER_TERM: "a loss of the parameters and the outputs",
    NO_HOOKS: "a use outside the module's forward pass",
    FOREIGN_GRADIENT: "a trained tensor that is no output of the module",
    FOREIGN_PARAMETERS: "an optimizer of other parameters, too",
    WRITTEN: "samples written into the model",
}
"""In words what a part of a message stands for; others are shown as they are."""
