"""Which folders of a data set are its splits: by their names, in any case and form."""

from __future__ import annotations

import pytest

from trainer.data.images.split_folders import split_folders
from trainer.errors import UserError

FOUND = [
    ("train val test", ("train", "val", "test")),
    ("Train Test", ("Train", "", "Test")),
    ("TRAIN VALID", ("TRAIN", "VALID", "")),
    ("training validation", ("training", "validation", "")),
    ("Training Validation Testing", ("Training", "Validation", "Testing")),
    ("train dev test", ("train", "dev", "test")),
    ("train eval", ("train", "eval", "")),
    ("train holdout", ("train", "", "holdout")),
    ("train hold-out val", ("train", "val", "hold-out")),
    ("train Hold_Out test", ("train", "Hold_Out", "test")),
    ("train heldout", ("train", "", "heldout")),
    ("training_set test_set", ("training_set", "", "test_set")),
    ("trainset valset", ("trainset", "valset", "")),
    ("TrainImages ValImages annotations", ("TrainImages", "ValImages", "")),
    ("train2017 val2017 test2017 annotations", ("train2017", "val2017", "test2017")),
    ("1_train 2_val 3_test", ("1_train", "2_val", "3_test")),
    ("seg_train seg_test seg_pred", ("seg_train", "", "seg_test")),
    ("imagenet-train imagenet-val", ("imagenet-train", "imagenet-val", "")),
    ("train train_unlabeled val", ("train", "val", "")),
    ("cat dog owl", ("", "", "")),
    ("steam_train bus tram", ("", "", "")),
    ("contrast testosterone latest trainer", ("", "", "")),
    ("bus car train", ("train", "", "")),
    ("Тrain поезд 火车", ("", "", "")),
]


@pytest.mark.parametrize(("names", "truth"), FOUND, ids=[names for names, _ in FOUND])
def test_splits_are_known_by_their_names(names: str, truth: tuple[str, str, str]) -> None:
    found = split_folders(names.split(), "data.root=d")
    assert (found.train, found.val, found.test) == truth
    assert {*found.others, *filter(None, truth)} == set(names.split())


@pytest.mark.parametrize(
    "names", ["train Train val", "train val valid", "train test testing", "train val test holdout"]
)
def test_two_folders_of_one_split_are_refused(names: str) -> None:
    with pytest.raises(UserError, match="has several folders that mean"):
        split_folders(names.split(), "data.root=d")


def test_the_folder_that_the_user_names_is_the_validation_folder() -> None:
    assert split_folders(["train", "val", "valid"], "data.root=d", val="valid").val == "valid"
    found = split_folders(["train", "test"], "data.root=d", val="test")
    assert (found.train, found.val, found.test) == ("train", "test", "")
    assert split_folders(["train", "mine"], "data.root=d", val="mine").others == ()
