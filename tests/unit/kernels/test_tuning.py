"""Launch parameters: files of devices, and what none may say."""

import json

import pytest
import torch

from kernels.tuning import FOLDER, InvalidTuning, Tuning, path_for, read, tuning, using, write

CPU = torch.device("cpu")


def test_what_is_written_is_read(tmp_path):
    path = path_for("NVIDIA H200 (SXM)", tmp_path)
    assert path.name == "NVIDIA-H200-SXM.json"
    chosen = Tuning(scan_block=4096, wide_products=False)
    write(path, chosen, {"device": "NVIDIA H200 (SXM)"})
    assert read(path) == chosen
    assert json.loads(path.read_text())["device"] == "NVIDIA H200 (SXM)"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scan_block": 1000}, "scan_block must be a power of two, got 1000"),
        ({"scan_block": "1024"}, "scan_block must be an integer"),
        ({"loss_stages": 0}, "loss_stages must be an integer in 1..65536, got 0"),
        ({"loss_stages": True}, "loss_stages must be an integer"),
        ({"wide_products": 1}, "wide_products must be true or false, got 1"),
        ({"scan_blok": 64}, "scan_blok"),
        (None, "NoneType"),
    ],
)
def test_what_no_kernel_can_take_is_refused(values, message, tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps({"values": values}))
    with pytest.raises(InvalidTuning, match=message):
        read(path)


def test_parameters_are_forced_for_a_while():
    before = tuning(CPU)
    with using(Tuning(copy_piece=64)):
        assert tuning(CPU).copy_piece == 64
    assert tuning(CPU) is before


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_files_that_come_with_the_product_can_be_used(path):
    read(path)
