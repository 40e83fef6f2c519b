"""What goes wrong in a compression method."""


class MethodError(ValueError):
    """A method, count mode or option that does not exist or does not fit together, or what a method cannot do here."""
