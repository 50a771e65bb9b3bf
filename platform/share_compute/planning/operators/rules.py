"""Rules that describe operations of torch (ATen) by the axes of their loops.

These are the propagation rules of DTensor (``torch.distributed.tensor``), and of GSPMD (Xu et al., 2021), as equations.
An operation without a rule gets no axes: each device computes all of it. Products without a rule are refused, unless
their floating-point operations are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from share_compute.planning.operators.calls import Dims, Rule, TracedCall
from share_compute.planning.operators.graph import COLUMN, FEATURES, NO_AXIS


def describe(call: TracedCall) -> Rule:
    """Return the description of a call."""
    rule = _RULES.get(call.operation, _pointwise if call.pointwise else None)
    found = rule(call) if rule is not None else None
    return found if found is not None else _other(call)


def _other(call: TracedCall) -> Rule:
    first = next((dims for dims in call.tensors if dims.shape == call.shape), None)
    names = list(first.names) if first is not None else [f"dim{place}" for place in range(len(call.shape))]
    rule = Rule("other", [NO_AXIS * len(dims.shape) for dims in call.tensors], names=names)
    reason = f"there is no rule for {call.operation}"
    rule.output = "".join(
        rule.axis(name, size, refusal=reason) for name, size in zip(names, call.shape, strict=True)
    )
    counted = _FLOPS.get(call.operation)
    rule.flops = 0 if counted is None else counted(call)
    return rule


def is_counted(call: TracedCall, rule: Rule) -> bool:
    """Return whether the rule of a call has its floating-point operations, or the call needs none."""
    return rule.kind != "other" or rule.flops > 0 or not _PRODUCTS & set(call.operation.split("_"))


def _vector_flops(call: TracedCall) -> int:
    """Count a product with a vector."""
    return 2 * max(math.prod(dims.shape) for dims in call.tensors)


def _transposed_flops(call: TracedCall) -> int:
    """Count a transposed convolution: each number of the input is multiplied by its part of the weight."""
    x, weight = call.tensors[:2]
    return 2 * math.prod(x.shape) * math.prod(weight.shape[1:])


def _attention_flops(call: TracedCall) -> int:
    query, key, value = (dims.shape for dims in call.tensors[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _pointwise(call: TracedCall) -> Rule:
    """Describe ``out[i] = f(a[i], b[i])`` with broadcasting."""
    widest = max(call.tensors, key=lambda dims: (len(dims.shape), math.prod(dims.shape)))
    if len(widest.shape) != len(call.shape):
        return _other(call)
    rule = Rule("elementwise", names=list(widest.names))
    letters = rule.dims(Dims(call.shape, widest.names))
    for dims in call.tensors:
        own = letters[len(letters) - len(dims.shape) :]
        rule.inputs.append(
            "".join(letter if size != 1 else NO_AXIS for letter, size in zip(own, dims.shape, strict=True))
        )
    rule.output = "".join(letters)
    return rule


def _copy(call: TracedCall) -> Rule:
    rule = _pointwise(call)
    rule.kind = "copy"
    return rule


def _linear(call: TracedCall) -> Rule:
    """Describe ``out[..., o] = sum_i x[..., i] * weight[o, i] + bias[o]``."""
    x, weight, *bias = call.tensors
    rule = Rule("matmul", names=[*x.names[:-1], FEATURES])
    leading = "".join(rule.dims(Dims(x.shape[:-1], x.names[:-1])))
    inner = rule.axis("row", x.shape[-1], contracted=True)
    outer = rule.axis(COLUMN, weight.shape[0])
    rule.inputs = [leading + inner, outer + inner, *(outer for _ in bias)]
    rule.output = leading + outer
    rule.flops = 2 * math.prod(x.shape) * weight.shape[0]
    return rule


def _addmm(call: TracedCall) -> Rule:
    """Describe ``out[r, o] = bias[o] + sum_i x[r, i] * weight[i, o]``."""
    bias, x, weight = call.tensors
    rule = _product(x, weight)
    own = rule.output[len(rule.output) - len(bias.shape) :]
    letters = (letter if size > 1 else NO_AXIS for letter, size in zip(own, bias.shape, strict=True))
    rule.inputs.insert(0, "".join(letters))
    return rule


def _matmul(call: TracedCall) -> Rule | None:
    left, right = call.tensors
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    return _product(left, right)


def _product(left: Dims, right: Dims) -> Rule:
    """Describe ``out[..., r, o] = sum_i left[..., r, i] * right[..., i, o]``, with broadcast leading dimensions."""
    wide = max(left, right, key=lambda dims: len(dims.shape))
    rule = Rule("matmul", names=[*wide.names[:-2], left.names[-2], right.names[-1]])
    count = len(wide.shape) - 2
    letters, lefts, rights = "", "", ""
    for place in range(count):
        at_left, at_right = (place - count + len(dims.shape) - 2 for dims in (left, right))
        sizes = [dims.shape[at] if at >= 0 else 1 for dims, at in ((left, at_left), (right, at_right))]
        letter = rule.axis(wide.names[place], max(sizes))
        letters += letter
        lefts += (letter if sizes[0] > 1 else NO_AXIS) if at_left >= 0 else ""
        rights += (letter if sizes[1] > 1 else NO_AXIS) if at_right >= 0 else ""
    row = rule.axis(left.names[-2], left.shape[-2])
    inner = rule.axis("row", left.shape[-1], contracted=True)
    outer = rule.axis(COLUMN, right.shape[-1])
    rule.inputs = [lefts + row + inner, rights + inner + outer]
    rule.output = letters + row + outer
    rule.flops = 2 * math.prod(axis.size for axis in rule.axes.values())
    return rule


def _grouped_product(call: TracedCall) -> Rule | None:
    """Describe ``out[r, o] = sum_i x[r, i] * weight[e(r), i, o]``: each row is multiplied by an expert's matrix."""
    x, weight, *offsets = call.tensors
    if len(x.shape) != 2 or len(weight.shape) != 3:
        return None
    rule = Rule("matmul", names=[x.names[0], FEATURES])
    whole = "the experts of the rows depend on data"
    row = rule.axis(x.names[0], x.shape[0], refusal=whole)
    inner = rule.axis("row", x.shape[1], contracted=True)
    expert = rule.axis("expert", weight.shape[0], refusal=whole)
    outer = rule.axis(COLUMN, weight.shape[2])
    rule.inputs = [row + inner, expert + inner + outer, *(NO_AXIS * len(dims.shape) for dims in offsets)]
    rule.output = row + outer
    rule.flops = 2 * math.prod(x.shape) * weight.shape[2]
    return rule


def _experts(call: TracedCall) -> Rule:
    """Describe ``out[t, o] = sum_e routed[t, e] * expert_e(x[t])[o]``: experts of a mixture, chosen by a router.

    ``routed`` follows from the inputs ``index[t, k]`` and ``weights[t, k]``. Each parameter has a row for each expert.
    """
    x, index, weights, *parameters = call.tensors
    rule = Rule("experts", names=list(x.names))
    tokens = rule.axis(x.names[0], x.shape[0])
    features = rule.axis(x.names[1], x.shape[1], refusal="an expert needs all features of a token")
    expert = rule.axis("expert", parameters[0].shape[0], contracted=True, has_factors=True)
    rule.inputs = [tokens + features, *(tokens + NO_AXIS for _ in (index, weights))]
    rule.inputs += [expert + NO_AXIS * (len(dims.shape) - 1) for dims in parameters]
    rule.output = tokens + features
    matrices = [dims.shape[1:] for dims in parameters if len(dims.shape) == 3]
    rule.flops = 2 * math.prod(index.shape) * sum(math.prod(shape) for shape in matrices)
    return rule


def _einsum(call: TracedCall) -> Rule | None:
    """Describe an einsum without repeated letters in a tensor. Several tensors are multiplied from left to right."""
    tensors, terms, output = call.tensors, *_terms(call)
    sizes, names = dict[str, int](), dict[str, str]()
    for dims, term in zip(tensors, terms, strict=True):
        for name, size, own in zip(dims.names, dims.shape, term, strict=True):
            sizes[own] = max(size, sizes.get(own, 1))
            names.setdefault(own, name if dims is tensors[0] else FEATURES)
    rule = Rule("matmul", names=[names[own] for own in output])
    letters = {
        own: rule.axis(
            names[own] if own in output else "row",
            size,
            contracted=own not in output,
            refusal="the diagonal is taken" if any(term.count(own) > 1 for term in terms) else "",
        )
        for own, size in sizes.items()
    }
    rule.inputs = [
        "".join(letters[own] if size > 1 else NO_AXIS for own, size in zip(term, dims.shape, strict=True))
        for dims, term in zip(tensors, terms, strict=True)
    ]
    rule.output = "".join(letters[own] for own in output)
    held = set(terms[0])
    for place, term in enumerate(terms[1:], start=2):
        rule.flops += 2 * math.prod(sizes[own] for own in held | set(term))
        held = (held | set(term)) & set("".join([*terms[place:], output]))
    return rule


def _terms(call: TracedCall) -> tuple[list[str], str]:
    """Return the letters of each tensor of an einsum and of its output, with digits for the dimensions of ``...``."""
    given, arrow, output = call.args[0].replace(" ", "").partition("->")
    terms, widest = list[str](), 0
    for term, dims in zip(given.split(","), call.tensors, strict=True):
        count = len(dims.shape) - len(term.replace("...", "")) if "..." in term else 0
        widest = max(widest, count)
        terms.append(term.replace("...", "".join(str(place) for place in reversed(range(count)))))
    more = "".join(str(place) for place in reversed(range(widest)))
    if not arrow:
        own = given.replace(",", "").replace(".", "")
        output = "..." + "".join(sorted(letter for letter in set(own) if own.count(letter) == 1))
    return terms, output.replace("...", more)


def _attention(call: TracedCall) -> Rule | None:
    """Describe attention of ``[batch, heads, sequence, features]``: keys and values may have fewer heads (GQA)."""
    query, key, value, *masks = call.tensors
    if len(query.shape) != 4:
        return None
    causal = bool(call.get(5, "is_causal", default=False))
    rule = Rule("attention", names=["batch", "heads", "sequence", FEATURES])
    batch = rule.axis("batch", query.shape[0])
    heads = rule.axis("heads", query.shape[1], parts=math.gcd(query.shape[1], key.shape[1]))
    alone = "a device with a part of the sequence needs other masks (ring attention)" if causal else ""
    rows = rule.axis("sequence", query.shape[2], refusal=alone)
    keys = rule.axis("keys", key.shape[2], refusal="the softmax needs the scores of all keys")
    depth = rule.axis("depth", query.shape[3], refusal="a score sums over all features of a head")
    width = rule.axis("depth", value.shape[3], refusal="the features of one head stay together")
    few = heads if key.shape[1] > 1 else NO_AXIS
    rule.inputs = [batch + heads + rows + depth, batch + few + keys + depth, batch + few + keys + width]
    for mask in masks:
        own = [batch, heads, rows, keys][4 - len(mask.shape) :]
        rule.inputs.append(
            "".join(letter if size > 1 else NO_AXIS for letter, size in zip(own, mask.shape, strict=True))
        )
    rule.output = batch + heads + rows + width
    rule.flops = 2 * math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
    return rule


def _embedding(call: TracedCall) -> Rule:
    """Describe ``out[..., f] = weight[ids[...], f]``; a device with some of the rows looks up some of the ids."""
    weight, ids = call.tensors
    rule = Rule("embedding", names=[*ids.names, FEATURES])
    rows = rule.axis("row", weight.shape[0], contracted=True)
    features = rule.axis(COLUMN, weight.shape[1])
    leading = "".join(rule.dims(ids))
    rule.inputs, rule.output = [rows + features, leading], leading + features
    return rule


def _last_norm(call: TracedCall) -> Rule:
    """Describe a norm over the last dimensions, whose sizes are the second argument."""
    count = len(call.args[1])
    return _norm(call, lambda place, rank: place >= rank - count, slice(-count, None))


def _batch_norm(call: TracedCall) -> Rule:
    """Describe a norm of each channel over the batch."""
    return _norm(call, lambda place, _rank: place != 1, slice(1, 2))


def _group_norm(call: TracedCall) -> Rule:
    """Describe a norm of groups of channels of each sample."""
    return _norm(call, lambda place, _rank: place > 0, slice(1, 2))


def _norm(call: TracedCall, normalized: Callable[[int, int], bool], weights: slice) -> Rule:
    x, *parameters = call.tensors
    rank = len(x.shape)
    refused = {place: "the statistics need all of it" for place in range(rank) if normalized(place, rank)}
    rule = Rule("norm", names=list(x.names))
    letters = rule.dims(x, refused)
    own = "".join(letters[weights])
    rule.inputs = ["".join(letters), *(own for _ in parameters)]
    rule.output = "".join(letters)
    return rule


def _softmax(call: TracedCall) -> Rule:
    x = call.tensors[0]
    along = call.get(1, "dim") % len(x.shape)
    rule = Rule("softmax", names=list(x.names))
    letters = "".join(rule.dims(x, {along: "the softmax needs all of it"}))
    rule.inputs, rule.output = [letters], letters
    return rule


def _sum(call: TracedCall) -> Rule | None:
    """Describe a sum or a mean over dimensions."""
    return _reduced(call, refusal="")


def _extreme(call: TracedCall) -> Rule | None:
    return _reduced(call, refusal="only sums are reduced over devices")


def _reduced(call: TracedCall, refusal: str) -> Rule | None:
    x, *others = call.tensors
    if others:
        return None
    rank = len(x.shape)
    given = call.get(1, "dim")
    places = (
        range(rank) if given is None or given == [] else given if isinstance(given, list | tuple) else [given]
    )
    summed = {place % rank for place in places} if rank else set()
    keeps = len(call.shape) == rank
    rule = Rule("reduction", names=[x.names[at] for at in range(rank) if keeps or at not in summed])
    inner = [
        rule.axis(
            "row" if at in summed else x.names[at],
            size,
            contracted=at in summed,
            refusal=refusal if at in summed else "",
        )
        for at, size in enumerate(x.shape)
    ]
    rule.inputs = ["".join(inner)]
    rule.output = "".join(
        NO_AXIS if at in summed else letter for at, letter in enumerate(inner) if keeps or at not in summed
    )
    return rule


def _permuted(call: TracedCall, order: Sequence[int]) -> Rule:
    x = call.tensors[0]
    rule = Rule("reshape", names=[x.names[place] for place in order])
    letters = rule.dims(x)
    rule.inputs = ["".join(letters)]
    rule.output = "".join(letters[place] for place in order)
    return rule


def _transpose(call: TracedCall) -> Rule:
    order = list(range(len(call.shape)))
    one, other = call.args[1], call.args[2]
    order[one], order[other] = order[other], order[one]
    return _permuted(call, order)


def _permute(call: TracedCall) -> Rule:
    return _permuted(call, [place % len(call.shape) for place in call.args[1]])


def _turn(call: TracedCall) -> Rule:
    return _permuted(call, list(reversed(range(len(call.shape)))))


def _reshape(call: TracedCall) -> Rule:
    """Describe a reshape: it joins or splits runs of dimensions, of which only the first dimension can be cut."""
    x = call.tensors[0]
    rule = Rule("reshape")
    inside, outside = [NO_AXIS] * len(x.shape), [NO_AXIS] * len(call.shape)
    names = ["features"] * len(call.shape)
    for before, after in _runs(x.shape, call.shape):
        if not before or not after:
            continue
        name = x.names[before[0]]
        if len(before) == len(after) == 1:
            inside[before[0]] = outside[after[0]] = rule.axis(name, x.shape[before[0]])
            names[after[0]] = name
            continue
        if name == FEATURES and len(after) > 1 and "sequence" in x.names:
            name = "heads"
        pieces = math.gcd(x.shape[before[0]], call.shape[after[0]])
        first = rule.axis(name, pieces, parts=pieces)
        inside[before[0]] = outside[after[0]] = first
        for place in before[1:]:
            inside[place] = rule.axis(
                x.names[place], x.shape[place], refusal="the reshape joins it with another"
            )
        for place in after[1:]:
            outside[place] = rule.axis(
                FEATURES, call.shape[place], refusal="the reshape takes it from another"
            )
        names[after[0]] = name if len(after) > 1 or name != "heads" else FEATURES
    rule.inputs, rule.output, rule.names = ["".join(inside)], "".join(outside), names
    return rule


def _runs(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dimensions with equal products before and after a reshape; size 1 is left out."""
    left = [place for place, size in enumerate(before) if size != 1]
    right = [place for place, size in enumerate(after) if size != 1]
    runs = list[tuple[list[int], list[int]]]()
    while left and right:
        run = ([left.pop(0)], [right.pop(0)])
        sizes = [before[run[0][0]], after[run[1][0]]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            place = (left, right)[side].pop(0)
            run[side].append(place)
            sizes[side] *= (before, after)[side][place]
        runs.append(run)
    return runs


def _expand(call: TracedCall) -> Rule | None:
    x = call.tensors[0]
    if len(x.shape) != len(call.shape):
        return None
    rule = Rule("reshape", names=list(x.names))
    letters = [
        rule.axis(name, size, refusal="" if size == own else "it is repeated")
        for name, size, own in zip(x.names, call.shape, x.shape, strict=True)
    ]
    rule.inputs = [
        "".join(NO_AXIS if size == 1 else letter for size, letter in zip(x.shape, letters, strict=True))
    ]
    rule.output = "".join(letters)
    return rule


def _part(call: TracedCall) -> Rule | None:
    """Describe a slice: only dimensions that keep their size can be cut."""
    x = call.tensors[0]
    if len(x.shape) != len(call.shape):
        return None
    rule = Rule("reshape", names=list(x.names))
    for name, size, old in zip(x.names, call.shape, x.shape, strict=True):
        letter = rule.axis(name, size, refusal="" if size == old else "a slice takes a part of it")
        rule.output += letter
    rule.inputs = [rule.output]
    return rule


def _select(call: TracedCall) -> Rule:
    x, along = call.tensors[0], call.args[1] % len(call.tensors[0].shape)
    rule = Rule("reshape", names=[name for place, name in enumerate(x.names) if place != along])
    letters = rule.dims(x, {along: "one entry is selected"})
    rule.inputs = ["".join(letters)]
    rule.output = "".join(letter for place, letter in enumerate(letters) if place != along)
    return rule


def _cat(call: TracedCall) -> Rule:
    parts = call.tensors
    along = call.get(1, "dim", 0) % len(call.shape)
    rule = Rule("copy", names=list(parts[0].names))
    letters = rule.dims(Dims(call.shape, parts[0].names), {along: "it is joined from several tensors"})
    rule.inputs, rule.output = ["".join(letters) for _ in parts], "".join(letters)
    return rule


def _convolution(call: TracedCall) -> Rule:
    """Describe ``out[n, o, ...] = sum_i,k x[n, i, ... + k] * weight[o, i, k]``."""
    x, weight, *bias = call.tensors
    spatial = len(x.shape) - 2
    rule = Rule("matmul", names=["batch", FEATURES, *["pixels"] * spatial])
    groups = call.get(6, "groups", default=1)
    grouped = "the convolution has groups" if groups != 1 else ""
    halo = "neighbours need its border (a halo)"
    batch = rule.axis("batch", x.shape[0])
    inner = rule.axis("row", weight.shape[1], contracted=True, refusal=grouped)
    outer = rule.axis(COLUMN, weight.shape[0], refusal=grouped)
    pixels = "".join(rule.axis("pixels", size, refusal=halo) for size in x.shape[2:])
    kernel = "".join(
        rule.axis("kernel", size, refusal="a kernel stays together") for size in weight.shape[2:]
    )
    rule.inputs = [
        batch + (inner if groups == 1 else NO_AXIS) + pixels,
        outer + inner + kernel,
        *(outer for _ in bias),
    ]
    rule.output = batch + outer + "".join(rule.axis("pixels", size, refusal=halo) for size in call.shape[2:])
    rule.flops = 2 * math.prod(call.shape) * math.prod(weight.shape[1:])
    return rule


def _pool(call: TracedCall) -> Rule | None:
    """Describe a pool over the dimensions after batch and channels."""
    x = call.tensors[0]
    if len(x.shape) < 3 or len(call.shape) != len(x.shape):
        return None
    rule = Rule("reduction", names=list(x.names))
    leading = "".join(rule.dims(Dims(x.shape[:2], x.names[:2])))
    halo = "neighbours need its border (a halo)"
    inside = "".join(rule.axis("pixels", size, refusal=halo) for size in x.shape[2:])
    outside = "".join(rule.axis("pixels", size, refusal=halo) for size in call.shape[2:])
    rule.inputs, rule.output = [leading + inside], leading + outside
    return rule


_RULES: dict[str, Callable[[TracedCall], Rule | None]] = {
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm", "grouped_mm"), _grouped_product),
    "experts": _experts,
    "einsum": _einsum,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(("layer_norm", "rms_norm", "_fused_rms_norm"), _last_norm),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("max", "amax", "amin", "min", "argmax", "var", "std"), _extreme),
    "transpose": _transpose,
    "permute": _permute,
    **dict.fromkeys(("t", "numpy_T"), _turn),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape
    ),
    "expand": _expand,
    **dict.fromkeys(("slice", "narrow", "split", "chunk", "split_with_sizes"), _part),
    "select": _select,
    **dict.fromkeys(("cat", "concat"), _cat),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(
        (
            "max_pool1d",
            "max_pool2d",
            "avg_pool1d",
            "avg_pool2d",
            "adaptive_avg_pool2d",
            "adaptive_max_pool2d",
        ),
        _pool,
    ),
    **dict.fromkeys(("to", "_to_copy", "clone", "contiguous", "type_as"), _copy),
    "dropout": _pointwise,
}
_FLOPS: dict[str, Callable[[TracedCall], int]] = {
    **dict.fromkeys(("matmul", "mv", "dot", "vdot"), _vector_flops),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_flops),
    "scaled_dot_product_attention": _attention_flops,
}
"""Floating-point operations of products whose axes are not described."""
_PRODUCTS = frozenset(
    (
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "addr", "mv", "dot", "matmul", "tensordot", "bilinear",
        "trilinear", "linear", "attention", "convolution", "conv", "conv1d", "conv2d", "conv3d", "linalg", "cdist",
        "lstm", "gru", "rnn",
    )
)  # fmt: skip
"""Parts of the names of operations that compute products."""
