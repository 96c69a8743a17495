"""The working that the demo model writes between its think tags: school arithmetic, column by
column.

Both numbers are first written with the same number of digits. A line of working is one column from
the right; after the colon stands the result so far. A subtraction first compares the numbers from
the left, and puts the larger one on top; the last line is the signed result:

    512-9               37+48
    --------            ---------------
    512-009             37+48
    5>0                 7+8=15 carry: 5
    512-009             3+4+1=8: 85
    2-9+10=3 borrow: 3  =85
    1-0-1=0: 03
    5-0=5: 503
    =503
"""

from demo_model.training.problem import Problem


def write_working(problem: Problem) -> str:
    """All lines of working for a problem, without the think tags."""
    width = max(len(str(problem.left)), len(str(problem.right)))
    left, right = f"{problem.left:0{width}d}", f"{problem.right:0{width}d}"
    if problem.operator == "+":
        lines = [f"{left}+{right}", *_addition_columns(left, right)]
    else:
        top, bottom = max(left, right), min(left, right)
        lines = [f"{left}-{right}", _comparison(left, right), f"{top}-{bottom}"]
        lines += _subtraction_columns(top, bottom)
    lines.append(f"={problem.answer}")
    return "\n".join(lines)


def _addition_columns(left: str, right: str) -> list[str]:
    lines, so_far, carry = [], "", 0
    for column in range(len(left) - 1, -1, -1):
        total = int(left[column]) + int(right[column]) + carry
        terms = f"{left[column]}+{right[column]}" + ("+1" if carry else "")
        carry = total // 10
        is_last = column == 0
        so_far = (str(total) if is_last else str(total % 10)) + so_far
        note = " carry" if carry and not is_last else ""
        lines.append(f"{terms}={total}{note}: {so_far}")
    return lines


def _comparison(left: str, right: str) -> str:
    """Digit by digit from the left, up to the first that differs."""
    parts = []
    for one, other in zip(left, right, strict=True):
        sign = "=" if one == other else ">" if one > other else "<"
        parts.append(f"{one}{sign}{other}")
        if one != other:
            break
    return " ".join(parts)


def _subtraction_columns(top: str, bottom: str) -> list[str]:
    lines, so_far, borrow = [], "", 0
    for column in range(len(top) - 1, -1, -1):
        rest = int(top[column]) - int(bottom[column]) - borrow
        terms = f"{top[column]}-{bottom[column]}" + ("-1" if borrow else "")
        borrow = int(rest < 0)
        if borrow:
            rest += 10
        so_far = f"{rest}{so_far}"
        mark, note = ("+10", " borrow") if borrow else ("", "")
        lines.append(f"{terms}{mark}={rest}{note}: {so_far}")
    assert borrow == 0, "the larger number is on top"
    return lines
