import pytest
from helpers.packing import write_voc


@pytest.fixture
def small_voc(tmp_path):
    """A root with a VOC 2012 folder to pack."""
    write_voc(tmp_path / "voc")
    return tmp_path / "voc"
