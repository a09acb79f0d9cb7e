import pytest

pytest.importorskip("nvflare")
