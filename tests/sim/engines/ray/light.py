"""Workers that need neither this package nor torch, since they are pickled with their code."""

import os


def light():
    """Return a class of workers whose tasks are a number, which they return, or a word.

    The class is local to this function, so that it is pickled with its code.
    """

    class Light:
        def prepare(self, *ends):
            if ends:
                os._exit(3)
            return os.getpid()

        def train(self, word):
            if word == "end":
                os._exit(3)
            if word == "refuse":
                raise KeyError("made up")
            if isinstance(word, str):  # "stop", or the path of a file that shows that the task has started.
                if word != "stop":
                    open(word, "x").close()
                os.read(os.pipe()[0], 1)  # It never returns.
            return word

    return Light


class Light(light()):
    """The same class, importable by processes of this machine."""
