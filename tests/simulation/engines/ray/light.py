"""Workers that need neither this package nor torch, since they are pickled with their code."""

import os


def light():
    """A class of workers whose tasks are a number, which they return, or what happens to them.

    A function's own, so that it is pickled with its code.
    """

    class Light:
        def prepare(self, *ends):
            if ends:
                os._exit(3)
            return os.getpid()

        def train(self, what):
            if what == "end":
                os._exit(3)
            if what == "refuse":
                raise KeyError("made up")
            if what == "stop":
                os.read(os.pipe()[0], 1)  # for ever
            if isinstance(what, str):  # a file that says so
                open(what, "x").close()
                os.read(os.pipe()[0], 1)
            return what

    return Light


class Light(light()):
    """The same for processes of this machine, which import it."""
