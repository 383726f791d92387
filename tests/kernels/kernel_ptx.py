"""How a compiled kernel computes its addresses, read from its PTX.

`row_offset_bits` answers what a table of more than 2^31 elements asks: is the offset of a row computed in 64 bits?
"""

import collections
import re

LEAVES = {"ld", "shr", "div", "rem", "shfl", "popc", "clz", "bfe", "redux"}  # their results are new numbers
SUMS = {"add", "sub", "or", "xor", "and", "min", "max", "selp", "mov", "cvt", "cvta", "neg", "abs"}
PRODUCTS = {"mul", "mad", "shl"}
ACCESS = re.compile(r"(?:ld|st|atom|red)\.(?!param|shared|local|const)[^;]*?\[\s*(%\w+)")


def _instructions(text: str) -> dict[str, list[tuple[list[str], list[str]]]]:
    """For each register, the instructions that set it: (opcode by its dots, source operands)."""
    setters = collections.defaultdict(list)
    for line in text.splitlines():
        found = re.match(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|[^,;]+),\s*(.*);", line)
        if found and not found[1].startswith(("st.", "red.")):
            operands = [operand.strip() for operand in found[3].split(",")]
            for register in re.findall(r"%\w+", found[2]):
                setters[register].append((re.split(r"[.:]+", found[1]), operands))
    return setters


def address_steps(text: str) -> dict[int, set[tuple[int, int]]]:
    """How far the indices of a PTX kernel move its addresses, and what a 32-bit number had to count meanwhile.

    An address is a parameter plus products of a factor and a number that the kernel has read or was given (an id of a
    thread or program). Each product is a pair (step, unit): the number moves the address by `step` bytes, and the last
    32-bit number on its way there counts `unit` bytes, so that it reaches 2^31 units. Of a cell in int32[N, 1024], by
    row and column, where rows are counted in rows:

        mul.wide.u32 %rd1, %row, 4096         (4096, 4096)
        mul.wide.u32 %rd2, %column, 4         (4, 4)

    and of the same cell in a flat int32[N * 1024], where rows are counted in cells:

        shl.b32      %r1, %row, 10            (4096, 4)
        add.s32      %r2, %r1, %column        (4, 4)
        mul.wide.s32 %rd1, %r2, 4

    Returns:
      The pairs for every kernel parameter, by its number, through which global memory is read or written.

    Raises:
      ValueError: an address depends on an instruction that this function does not know, or on a product of two numbers
        that are known only to the running kernel.
    """
    setters, found = _instructions(text), collections.defaultdict(set)

    def constant(operand):
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
            return int(operand, 0)
        made = setters.get(operand, [])
        return constant(made[0][1][0]) if len(made) == 1 and made[0][0][0] == "mov" else None

    def follow(register, step, unit, path):
        """(parameters, pairs) of all that the register's value is made of; it moves the address by step a unit."""
        if unit is None and not register.startswith("%rd"):
            unit = step  # here 32 bits become 64
        if register not in setters:  # a special register, or the name of shared memory
            return set(), {(step, unit)} if register.startswith("%") else set()
        parameters, pairs = set(), set()

        def join(operand, step):
            more = follow(operand, step, unit, path | {register})
            parameters.update(more[0])
            pairs.update(more[1])

        for opcode, operands in () if register in path else setters[register]:
            kind = opcode[0]
            if opcode[:2] == ["ld", "param"]:
                parameters.add(int(re.search(r"_param_(\d+)", operands[0])[1]))
            elif kind in LEAVES or opcode[:2] == ["mul", "hi"]:
                pairs.add((step, unit or step))
            elif kind in PRODUCTS:
                value, times = operands[:2] if constant(operands[0]) is None else operands[1::-1]
                if (times := constant(times)) is None:
                    raise ValueError(f"{register} is a product of two run-time values: {'.'.join(opcode)} {operands}")
                join(value, step << times if kind == "shl" else step * abs(times))
                if kind == "mad":
                    join(operands[2], step)
            elif kind in SUMS:
                for operand in operands[:2] if kind == "selp" else operands:
                    if (number := constant(operand)) is None:
                        join(operand, step)
                    elif kind in ("add", "sub") and len(setters[register]) > 1:  # advances in a loop
                        pairs.add((step * abs(number), unit or step * abs(number)))
            else:
                raise ValueError(f"an address depends on {'.'.join(opcode)} {operands}, which is not known here")
        return parameters, pairs

    for register in ACCESS.findall(text):
        parameters, pairs = follow(register, 1, None, frozenset())
        for parameter in parameters:
            found[parameter] |= pairs
    return dict(found)


def row_offset_bits(text: str, parameter: int, row_bytes: int) -> int:
    """In how many bits a PTX kernel computes the offset of a row of a parameter's table: 32 or 64.

    Raises:
      LookupError: no address of the parameter moves by rows, so that there is nothing to prove.
    """
    steps = {(step, unit) for step, unit in address_steps(text).get(parameter, ()) if step >= row_bytes}
    if not steps:
        raise LookupError(f"no address of parameter {parameter} moves by rows of {row_bytes} bytes")
    return 64 if all(unit >= row_bytes for _, unit in steps) else 32
