"""Colours of classes in pictures."""

__all__ = ["bit_palette"]


def bit_palette(count: int) -> list[tuple[int, int, int]]:
    """Colours of classes 0 to count - 1, as Pascal VOC gives them: the bits of the number, dealt to red, green, blue.

    Bits 0, 3 and 6 of a number are the highest bits of its red, bits 1, 4 and 7 of its green, 2, 5 and 8 of its blue.
    """
    return [
        tuple(sum((n >> 3 * place + c & 1) << 7 - place for place in range(8)) for c in range(3)) for n in range(count)
    ]  # type: ignore[misc]
