"""What the older plugin leaves in the folder that is core's, and its two entry points."""


def register():
    return None


def register_model():
    return None
