"""Declare the structs and sizes that Python, compiled code and devices share.

Each stands here once, as codes do in ``codes.py``. The C++ header ``core/layouts.h`` is generated
from both whenever kernels are compiled, and numpy's layouts are read from here
(``dpkern.ops.backends._tables``). Compiling the header proves that C++ lays every struct out as
computed here.

Only the standard library is used: the build runs this file before anything is installed.
"""

from __future__ import annotations

from . import laws
from .codes import (
    COEF_FORMS,
    DISTRIBUTIONS,
    STYLES,
    DrawSource,
    NoiseOrigin,
    RuleForm,
    RuleKind,
    SumType,
)
from .struct_types import BOOL, F64, I32, I64, U32, U64, LayoutSize, Struct, code, pointer

# sizes

TILE = LayoutSize(512, "coordinates of a noise tile")
LANES = LayoutSize(16, "cipher blocks side by side in a tile")
GUIDE = LayoutSize(4096, "buckets of a cumulative table's guide")
FINE_BITS = LayoutSize(laws.FINE_BITS, "output cell g = 2^14 u")
SCALE_UNITS = LayoutSize(laws.SCALE_UNITS, "certified scale in units of u", "std::int64_t")
CHUNK = LayoutSize(4096, "columns of a gradient that are summed together", "std::int64_t")
UPDATE_PIECE = LayoutSize(2048, "elements of a piece, if no noise is made", "std::int64_t")

# Threads of a block, and how much a block does.
TILE_THREADS = LayoutSize(128, "of a block that makes noise")
TILES_PER_BLOCK = LayoutSize(TILE_THREADS // LANES, "noise tiles of such a block")
CIPHER_THREADS = LayoutSize(256, "of a block with one cipher block for each thread")
SYMBOLS_PER_CIPHER_BLOCK = LayoutSize(8, "symbols that are answered from one cipher block")
FLAT_THREADS = LayoutSize(256, "of a block that makes no noise")
COEF_PIECE = LayoutSize(2048, "coefficients of such a block")
DESCENT_THREADS = LayoutSize(256, "of a block that trains a run")
WINDOW = LayoutSize(1536, "terms of a loss that a block holds at a time")
ROW_THREADS = LayoutSize(256, "of a block that reads rows of gradients")
BLOCK_COLUMNS = LayoutSize(1024, "columns that such a block sums")
FACTOR_THREADS = LayoutSize(128, "of a block that makes clip factors")
WARP = LayoutSize(32, "threads of a warp")

# Transforms of maps, one level for a line.
SPECTRAL_THREADS = LayoutSize(192, "of a block that transforms maps")
SPECTRAL_EACH = LayoutSize(3, "frequencies ky of a thread")
SPECTRAL_FOLDED = LayoutSize(4 * 33 * 36, "entries of folded maps that a block holds")
SPECTRAL_FOLDED_WIDE = LayoutSize(4 * 33 * 34, "in double")
SPECTRAL_LINES = LayoutSize(4 * 36 * 17, "entries of lines that a block holds")
SPECTRAL_LINES_WIDE = LayoutSize(4 * 34 * 8, "in double")
# Longer lines, in two levels.
SPECTRAL_LONG_THREADS = LayoutSize(320, "of a block that transforms maps with long lines")
SPECTRAL_TILE = LayoutSize(8, "complex sums of such a thread")
SPECTRAL_TILE_WIDE = LayoutSize(4, "in double")
SPECTRAL_PART = LayoutSize(16, "products that are added up by themselves")
SPECTRAL_VOLUME_THREADS = LayoutSize(256, "of a block that transforms volumes")
SPECTRAL_VOLUME = LayoutSize(5120, "complex numbers of volumes that a block holds")
SPECTRAL_VOLUME_WIDE = LayoutSize(2560, "in double")
PAIR_THREADS = LayoutSize(128, "of a block whose threads have channel pairs")
SPECTRAL_PAIRS = LayoutSize(4, "output channels of such a thread")
SPECTRAL_ROWS = LayoutSize(5, "whitened coordinates that it has at a time")
SPECTRAL_CHUNK = LayoutSize(16, "bins that are added up by themselves")
CIRCULANT_BLOCK = LayoutSize(128, "values of the largest block that kernels multiply")
CIRCULANT_NORM_BLOCK = LayoutSize(512, "values of the largest block that the norm takes")
CIRCULANT_NORM_THREADS = LayoutSize(128, "of the block of a sample")
CIRCULANT_TILE = LayoutSize(16, "rows, and columns, of products of a block")
CIRCULANT_THREADS = LayoutSize(CIRCULANT_TILE**2, "of such a block")
CIRCULANT_BINS = LayoutSize(8, "frequencies that a thread has at a time")
CIRCULANT_STEP = LayoutSize(4, "terms that are transformed together")
SPECTRAL_TOGETHER = LayoutSize(4, "bins of a weighted sum that a thread has at a time")

SIZES = {name: value for name, value in list(globals().items()) if isinstance(value, LayoutSize)}

# structs

STREAM = Struct(
    "Stream",
    "One keystream. The counter of the cipher is the position.",
    key=U32("256 bits")[8],
    n0=U32("nonce"),
    n1=U32,
    rounds=I32("20, 12 or 8"),
)
DRAWS = Struct(
    "Draws",
    "The source of a step's draws, at positions first, first + 1, ...",
    source=code(DrawSource),
    law=code(DISTRIBUTIONS)("of a cumulative table"),
    first=U64,
    count=I64("of the values"),
    values=pointer("const std::int32_t")("prefetched"),
    rounding=pointer("const std::int16_t")("16 bits each; null: the rounding stream gives them"),
    table=pointer("const void")("samples in reading order, or a cumulative table (core/cdt.h)"),
    entries=I64("of the table: samples until they come again, or boundaries"),
    cursor=I64("the sample of position `first`"),
    shift=I32("by so many bits a sample counts units of u"),
    stream=STREAM("of the words that a cumulative table is looked up by"),
)
RESPONSE_PARAMS = Struct(
    "ResponseParams",
    "Randomized response. Keep the symbol if word < keep. Otherwise return (symbol + 1 + j) mod "
    "categories with j = min((word - keep) / width, categories - 2).",
    keep=U64,
    width=U64("floor((2^64 - keep) / (categories - 1)) words for each other symbol"),
    reciprocal=U64("floor((2^64 - 1) / width)"),
    categories=U32,
)

# Convolutions
CONV_SIZE = Struct("ConvSize", "Rows and columns.", height=I64, width=I64)
GEOMETRY = Struct(
    "Geometry",
    "A convolution of zero-padded planes; one spatial dimension is a plane of height 1.",
    batch=I64,
    in_channels=I64,
    out_channels=I64,
    groups=I64,
    input=CONV_SIZE,
    output=CONV_SIZE,
    kernel=CONV_SIZE,
    stride=CONV_SIZE,
    padding=CONV_SIZE,
    dilation=CONV_SIZE,
)

# Clipping. Devices read lists of tensors from tables in their own memory.
CLIP_RULE = Struct(
    "ClipRule",
    "Clip factors from squared norms.",
    max_norm=F64("infinity: no clipping"),
    scale=F64("takes captured gradients to those of each sample's own loss"),
    automatic=BOOL,
)
CLIP_BOUND = Struct(
    "ClipBound",
    "The clip group of the task at the same place.",
    max_norm=F64("C, the same for all tasks unless per layer"),
    per_unit=F64("1 / u, exact arithmetic only"),
    unit_bound=I64("M = floor(C / u), exact arithmetic only"),
)
ROW_TASK = Struct(
    "RowTask",
    "One parameter's per-sample gradients [rows, columns] without gaps, and where their sum goes.",
    rows=pointer("const void"),
    sum=pointer("void")("null: norms only"),
    columns=I64,
    first_chunk=I64("kChunk columns each, of all tasks before this one"),
    first_column=I64("of all tasks before this one"),
)
ROW_MAP = Struct(
    "RowMap",
    "(x - center) / scale, one of each for every column of the task at the same place.",
    scale=pointer("const double")("null: 1"),
    center=pointer("const double")("null: 0"),
)
ROWS = Struct(
    "Rows",
    "A list of tensors: tasks[0 .. count), the totals over all of them, and the batch size.",
    tasks=pointer("const RowTask"),
    count=I64,
    chunks=I64,
    columns=I64,
    rows=I64,
)
CLIP = Struct(
    "Clip",
    "What a call computes: norms[row, task], and for the sums factors[row, task] and, exact "
    "arithmetic only, the powers of each row's integers by clip group: [row] or, per layer, "
    "[row, task].",
    template="Value",
    style=code(STYLES),
    p=I32,
    has_sums=BOOL,
    exact=BOOL,
    bounds=pointer("const ClipBound"),
    norms=pointer("double"),
    factors=pointer("Value"),
    powers=pointer("std::int64_t"),
)
FACTORS = Struct(
    "Factors",
    "The factor of a row in a task: of[row row_stride + task task_stride].",
    template="Value",
    of=pointer("const Value"),
    row_stride=I64,
    task_stride=I64,
)
POWERS = Struct(
    "Powers",
    "Where the powers of the integers go: of[row row_stride + task task_stride].",
    of=pointer("std::int64_t"),
    row_stride=I64,
    task_stride=I64,
    p=I32,
)

# Updates
RULE = Struct(
    "Rule",
    "The optimizer as torch.optim defines it; numbers that depend on the step count are "
    "ready-made.",
    kind=code(RuleKind),
    lr=F64,
    weight_decay=F64,
    decoupled=BOOL("AdamW: the decay multiplies the parameter and does not join the gradient"),
    momentum=F64("SGD"),
    dampening=F64,
    nesterov=BOOL,
    first_step=BOOL("the momentum buffer starts as the gradient itself"),
    beta1=F64("Adam"),
    beta2=F64,
    eps=F64,
    bias1=F64("1 - beta1^t"),
    bias2=F64("1 - beta2^t"),
)
RULE_NUMBERS = Struct(
    "RuleNumbers",
    "The rule as one element needs it (core/optimizer.h).",
    form=code(RuleForm),
    first_step=I32("the momentum buffer starts as the gradient itself"),
    lr=F64,
    decay=F64("joins the gradient"),
    momentum=F64("SGD"),
    fresh=F64("1 - dampening"),
    shrink=F64("Adam: the decoupled decay"),
    fresh1=F64("1 - beta1"),
    keep2=F64("beta2"),
    fresh2=F64("1 - beta2"),
    eps=F64,
    root2=F64("sqrt(1 - beta2^t)"),
    step=F64("lr / (1 - beta1^t)"),
)
UPDATE_TASK = Struct(
    "UpdateTask",
    "One parameter tensor of an update.",
    param=pointer("void"),
    sum=pointer("const void"),
    state1=pointer("void")("momentum buffer or first moment, or null"),
    state2=pointer("void")("second moment, or null"),
    size=I64,
    first_position=U64("of its noise; element i stands at first_position + i"),
    first_piece=I64("of all tasks before this one"),
    draws_at=I64("where its first draw stands; only with prefetched draws"),
    per_unit=F64("1 / u, float sums with noise only"),
    step=F64("takes a sum, or a released count, to the gradient"),
    aligned16=I64("whether every array that this task touches begins at 16 bytes"),
)
UPDATE_MAP = Struct(
    "UpdateMap",
    "The coordinates that a task's sum is noised in; rank 0: the sum is noised as it is.",
    signal=pointer("const double")("[taps, rank], or null: the sum holds coordinates"),
    back=pointer("const double")("[rank, taps]"),
    pairs=I64,
    cell=F64("of float sums"),
    factor=F64("takes what is led back to the gradient"),
    rank=I32,
    taps=I32,
    own=I64("tiles of a block in which its channel pairs begin"),
)
UPDATE_CLOCK = Struct(
    "UpdateStepCounter",
    "The step count in device memory, so that a recorded graph of launches makes fresh noise.",
    step=U64("joins n1 of both streams; Adam's t is step + 1"),
    beta1_power=F64("beta1^t"),
    beta2_power=F64,
    lr=F64("of this step"),
    shrink=F64("1 - lr decay, or 1"),
    due=U64("the only step that updates, from 1 on; 0: any"),
)
UPDATE_PLAN = Struct(
    "UpdatePlan",
    "What an update is asked for. A piece is kUpdatePiece elements if their draws lie in memory or "
    "there are none, else a noise tile that a tensor touches.",
    rule=RULE_NUMBERS,
    draws=DRAWS,
    rounding=STREAM("only read for float sums"),
    step_counter=pointer("const UpdateStepCounter")("or null"),
    tasks=I64,
    pieces=I64,
    noise=code(NoiseOrigin),
    law=code(DISTRIBUTIONS),
    sum_type=code(SumType),
    wide=I32("parameters, states and float sums are double"),
)

UPDATE_NOISE = Struct(
    "UpdateNoise",
    "The noise of an update on the CPU.",
    on=BOOL,
    law=code(DISTRIBUTIONS),
    stream=STREAM,
    rounding=STREAM("only read for float sums"),
    draws=DRAWS,
)

PAIR_MAP = Struct(
    "PairMap",
    "Coordinates of a channel pair's taps, in which noise is added, and the way back; no matrices: "
    "the sum is noised as it is.",
    signal=pointer("const double")("[rank, taps], or null: the sum holds coordinates"),
    back=pointer("const double")("[taps, rank]"),
    rank=I64,
    taps=I64,
)

# Coefficients of polynomial losses
COEF_NOISE = Struct(
    "CoefNoise",
    "Laplace noise of rows of coefficients on the CPU: linear ones from `linear` on, quadratic "
    "ones from the next multiple of 512 behind them on.",
    on=BOOL,
    stream=STREAM,
    rounding=STREAM,
    draws=DRAWS,
    linear=U64,
    scale=F64("of all rows"),
    scales=pointer("const void")("of each row; null: scale"),
    wide_scales=BOOL("double, else float"),
)
COEF_PLAN = Struct(
    "CoefPlan",
    "Noise of the coefficients of rows x columns targets: element i has its linear coefficient at "
    "position linear + i, its quadratic one at quadratic + i.",
    draws=DRAWS,
    rounding=STREAM,
    linear=U64,
    quadratic=U64,
    linear_at=I64("where the draw of element 0 stands among those in memory"),
    quadratic_at=I64,
    per_units=pointer("const void")("1 / u of each row, in the targets' type, or null: per_unit"),
    cells=pointer("const void")("and its cell"),
    per_unit=F64,
    cell=F64,
    rows=I64,
    columns=I64,
    noise=code(NoiseOrigin),
    form=code(COEF_FORMS),
    wide=I32("targets are double"),
    aligned16=I32("every array that is moved in packs, and the draws, begin at 16 bytes"),
)
DESCENT = Struct(
    "Descent",
    "SGD on the noisy polynomial loss of runs of autoencoders: coef.descend's arguments and sizes.",
    encoder=pointer("void"),
    decoder=pointer("void"),
    stopped=pointer("std::int32_t"),
    inputs=pointer("const void"),
    targets=pointer("const void"),
    order=pointer("const std::int64_t"),
    added=pointer("const void")("or null"),
    draws=pointer("const std::int32_t")("or null: no noise"),
    rounding=pointer("const std::int16_t"),
    lr=F64,
    constant=F64,
    limit=F64,
    scale=F64,
    growth=F64,
    runs=I64,
    users=I64,
    features=I64,
    units=I64("of the code"),
    steps=I64,
    records=I64("in a table"),
    input_tables=I64("1, or one for each run"),
    target_tables=I64,
    form=code(COEF_FORMS),
)
FEATURE_SIZES = Struct(
    "FeatureSizes", "Sizes of a loss that holds the hidden layer.", classes=I64, width=I64
)
FEATURE_ARRAYS = Struct(
    "FeatureArrays",
    "Its operands and results.",
    template="T",
    hidden=pointer("const T"),
    targets=pointer("const T"),
    weights=pointer("const T"),
    loss=pointer("double"),
    dhidden=pointer("T"),
)
FEATURE_SUMS = Struct(
    "FeatureSums",
    "What a record makes on the way: [records, classes * width] and [records, classes].",
    linear=pointer("double")("a1 + a2 W"),
    columns=pointer("double")("a2^T W, then the derivative by the weights"),
    terms=pointer("double")("losses of the classes"),
    slopes=pointer("double")("derivatives by their scores"),
)


# Norms and sums in the frequency domain
SPECTRAL_MAPS = Struct(
    "SpectralMaps",
    "One operand's maps [batch, channels, height, width], of which the first rows and columns are "
    "used.",
    data=pointer("const void"),
    batch=I64,
    channels=I64,
    groups=I64,
    splits=I64("parts of a group's channels"),
    height=I64,
    width=I64,
    rows=I64,
    columns=I64,
)
SPECTRAL_BLOCKS = Struct(
    "SpectralBlocks",
    "The way in which blocks transform maps, one level for a line.",
    row_turns=pointer("const void")("cosines and sines along rows, [2, folded index, kx]"),
    column_turns=pointer("const void")("along columns, [2, ky, folded index]"),
    across=I32("frequencies kx"),
    down=I32("frequencies ky"),
    together=I32("kx of a block"),
    lanes=I32("threads of each kx"),
    teams=I32("maps of a block"),
)
SPECTRAL_LINE = Struct(
    "SpectralLine",
    "A line of n1 n2 values in two levels. Tables hold pairs of cosine and sine.",
    first=pointer("const void")("[a, k1 to whole tiles], of 2 pi k1 a / n1"),
    phases=pointer("const void")("[k1, b], of 2 pi k1 b / n"),
    second=pointer("const void")("[b, m], of 2 pi m b / n2"),
    n1=I32,
    n2=I32,
    count=I32("of the values, zeros behind them"),
)
SPECTRAL_LONG = Struct(
    "SpectralLong",
    "The way in which blocks transform maps, two levels for a line.",
    across=SPECTRAL_LINE("along rows: kx"),
    down=SPECTRAL_LINE("along columns: ky"),
    lines=I32("k1 of a block along rows"),
    parts=I32("parts of the frequencies of each k1, which have blocks of their own"),
    maps=I32("maps that a block has at a time"),
    rows=I32("rows that it takes at a time, to whole tiles"),
)
SPECTRAL_VOLUMES = Struct(
    "SpectralVolume",
    "The way in which blocks transform volumes. Tables hold pairs of cosine and sine.",
    row_turns=pointer("const void")("[column, kx]"),
    column_turns=pointer("const void")("[row, ky]"),
    depth_turns=pointer("const void")("[plane, kz]"),
    across=I32("frequencies kx"),
    down=I32("frequencies ky"),
    deep=I32("frequencies kz"),
    planes=I32,
    rows=I32("of a plane"),
    together=I32("kx of a block"),
)
SPECTRAL_KEPT = Struct(
    "SpectralKept",
    "Retained bins of one operand, in the order of the places [kx, ky, kz], and of one level of a "
    "plane the signs of ky, that they stand at.",
    first=pointer("const std::int32_t")("where those of each begin, and the last end"),
    which=pointer("const std::int32_t")("the number of the bin"),
    turns=pointer("const void")("Re = t0 A + t1 B, Im = t2 A + t3 B of A - i B at the place"),
    out=pointer("void")("[bins, batch, 2, channels], or null"),
)
SPECTRAL_PRODUCT = Struct(
    "SpectralProduct",
    "Tables and errors of a norm over frequencies.",
    index=pointer("const std::int64_t")("the place of g for each place of x"),
    weights=pointer("const double")("[places of x, 3], of M M, N N and M N, or 1, of powers"),
    x_weights=pointer("const double")("Parseval's"),
    g_weights=pointer("const double"),
    groups=I64,
    x_places=I64,
    g_places=I64,
    x_splits=I64,
    g_splits=I64,
    parts=I64("numbers of a place: 2, M and N, or 1, a power"),
    x_error=F64("of a transform, relative to the norm of its map"),
    g_error=F64,
    sums_error=F64("of the product, relative to the sum of M M"),
    share=F64("the root of the size of the grid of g"),
    lost=F64("what underflows in sums of squares"),
)
SPECTRAL_PAIRS_OF = Struct(
    "SpectralPairs",
    "Retained bins, and what they add to whitened coordinates.",
    even=pointer("const void")("[tile, bin, kSpectralRows], of Re Z"),
    odd=pointer("const void")("of Im Z"),
    turns=pointer("const void")("[bins, 2], what the bins of x are multiplied by"),
    batch=I64,
    ins=I64,
    outs=I64,
    groups=I64,
    bins=I64,
    pieces=I64("blocks of a group of a sample"),
    tiles=I64("of coordinates"),
    even_tiles=I64,
    odd_from=I64("the first tile of Im Z"),
)
SPECTRAL_BOUND = Struct(
    "SpectralBound",
    "Errors of whitened coordinates.",
    weights=pointer("const double")("Parseval's, of each bin"),
    stretch=F64,
    product_error=F64,
    x_error=F64,
    g_error=F64,
    share=F64,
    lost=F64("what underflows in products and sums"),
    least=F64("squared norms of an operand that are in range"),
    most=F64,
    terms=F64("of the sum of squares"),
)
SPECTRAL_TAPS = Struct(
    "SpectralTaps",
    "Retained bins, and what they add to taps.",
    turns=pointer("const void")("[bins, taps, 2], of Re S and Im S"),
    batch=I64,
    ins=I64,
    outs=I64,
    groups=I64,
    bins=I64,
    taps=I64,
)

CIRCULANT_NORM = Struct(
    "CirculantNorm",
    "Blocks of a circulant layer at one position of each sample.",
    turns=pointer("const double")("cosines and sines of the circle, [2, block]"),
    weights=pointer("const double")("of each frequency in the squared norm"),
    ins=I64,
    outs=I64,
    error=F64("what rounding can hide, as a part of the product of the operands' squares"),
    block=I32,
    bins=I32("block / 2 + 1"),
)
CIRCULANT_POSITIONS = Struct(
    "CirculantPositions",
    "Blocks of a circulant layer at several positions of each sample.",
    turns=pointer("const double")("cosines and sines of the circle, [2, block]"),
    weights=pointer("const double")("of each frequency in the squared norm"),
    ins=I64,
    outs=I64,
    positions=I64,
    tiles=I64("of the pairs of a sample"),
    across=I64("tiles side by side"),
    square_error=F64("what rounding can hide of the square, as a part of the operands' squares"),
    norm_error=F64("the same of its root, as a part of the operands' norms"),
    spare=F64("by which the square is multiplied, for the last few roundings"),
    block=I32,
    bins=I32("block / 2 + 1"),
    grams=I32("1: pairs are positions; 0: blocks of the gradient"),
)
CIRCULANT_PAIRS = Struct(
    "CirculantPairs",
    "Sums over terms of products of circulant blocks, for every row of one operand and column of "
    "the other. Strides count numbers.",
    turns=pointer("const void")("cosines and sines of the circle, [2, block]"),
    weights=pointer("const void")("of each frequency on the way back"),
    rows=I64,
    columns=I64,
    terms=I64,
    positions=I64("terms that share a factor"),
    a_term=I64,
    a_place=I64,
    b_term=I64,
    b_place=I64,
    row_stride=I64("of the results"),
    column_stride=I64,
    split_stride=I64,
    block=I32,
    bins=I32,
    sign=I32("1: the conjugate of the first operand's transform; -1: itself"),
)

STRUCTS = tuple(value for value in list(globals().values()) if isinstance(value, Struct))
"""Every struct, each after those that it holds."""
