"""Module that the older plugin leaves in core's folder, and its two entry points."""


def register():
    return None


def register_model():
    return None
