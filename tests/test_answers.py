"""Answers are found where they are asked for, compared as numbers or texts, and never raise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsp.rl.task import TaskError, scorer
from rlsp.rl.task.extract import (
    after_hashes,
    boxed,
    last_number,
    number,
    right_answer,
    same_answer,
    tagged,
)
from rlsp.rl.task.scorer import (
    EXTRACTIONS,
    ExactScorer,
    MathVerifyScorer,
    answer_of,
    math_verify_is_installed,
)

WHERE = ["exact", *EXTRACTIONS]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so it is 42.", "42"),
        ("is -5", "-5"),
        ("7-5", "5"),
        ("7 - 5 = 2", "2"),
        ("(3)-1", "1"),
        ("x=-$1,234.50", "-1234.5"),
        ("1,2,3", "3"),
        ("1,234,567", "1234567"),
        ("12,34", "34"),
        ("\N{MINUS SIGN}7", "-7"),
        (".5", "0.5"),
        ("007", "7"),
        ("-0", "0"),
        ("3.1400", "3.14"),
        ("v2.0.1", "1"),
        ("none", None),
        ("", None),
        ("٣", None),
    ],
)
def test_the_last_number_is_found_with_its_sign(text: str, found: str | None) -> None:
    assert last_number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{ {a}{b} }", "{a}{b}"),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("5", None),
    ],
)
def test_the_last_box_is_opened_to_its_own_brace(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_tags_and_hashes_are_read_from_the_end() -> None:
    assert tagged("<answer>1</answer> or <answer> 2\n</answer> x") == "2"
    assert tagged("<answer>1") is tagged("1</answer>") is tagged("</answer><answer>") is None
    assert after_hashes("a #### 1\n#### 72 \nmore") == "72"
    assert after_hashes("####") == ""
    assert after_hashes("72") is None


@pytest.mark.parametrize(
    ("given_", "right", "same"),
    [
        ("72", "72", True),
        ("72.0", "72", True),
        ("1,000", "1000", True),
        ("$18", "18", True),
        ("072", "72", True),
        ("+3", "3", True),
        ("72.", "72", True),
        ("-0.0", "0", True),
        ("7", "72", False),
        ("-3", "3", False),
        ("72 apples", "72", False),
        ("1e3", "1000", False),
        ("Paris", " Paris.", True),
        ("paris", "Paris", False),
        ("a  b", "a b", True),
        ("1/2", "1/2", True),
        ("0.1", "0.10000000000000000001", False),
        ("9" * 10_000, "9" * 10_000, True),
    ],
)
def test_numbers_are_compared_as_numbers_and_texts_as_texts(given_: str, right: str, same: bool) -> None:
    assert same_answer(given_, right) is same_answer(right, given_) is same


def test_a_labels_own_marks_are_taken_off() -> None:
    assert right_answer("Six and one.\n#### 7") == "7"
    assert right_answer(r"Thus \boxed{x+1}.") == "x+1"
    assert right_answer(" 7 ") == "7"


@pytest.mark.parametrize(
    ("where", "text", "score"),
    [
        ("exact", "<answer>7</answer> 8", 1.0),
        ("exact", r"8 \boxed{7} 9", 1.0),
        ("exact", "8\n#### 7", 1.0),
        ("exact", "it is 7", 1.0),
        ("exact", "<answer>8</answer> 7", 0.0),
        ("tag", "7", 0.0),
        ("tag", "<answer>7</answer>", 1.0),
        ("boxed", r"\boxed{7}", 1.0),
        ("boxed", "7", 0.0),
        ("hashes", "#### 7", 1.0),
        ("hashes", "7", 0.0),
        ("number", "<answer>7</answer> 8", 0.0),
        ("number", "x is 7!", 1.0),
        ("text", "7 ", 1.0),
        ("text", "it is 7", 0.0),
    ],
)
def test_each_scorer_looks_where_it_says(where: str, text: str, score: float) -> None:
    assert ExactScorer(where).score("#### 7", text) == score


def test_without_marks_a_text_is_compared_as_a_whole() -> None:
    assert ExactScorer("exact").score("blue", " blue") == 1.0
    assert ExactScorer("exact").score("blue", "it is blue") == 0.0
    assert answer_of("3 cats", "exact", numeric=False) == "3 cats"


def test_an_unknown_place_is_refused_and_places_have_names_of_their_own() -> None:
    with pytest.raises(
        ValueError, match="unknown scorer 'guess'; legal: exact, tag, boxed, hashes, number, text"
    ):
        ExactScorer("guess")
    assert len({ExactScorer(where).name for where in WHERE}) == len(WHERE)


needs_math_verify = pytest.mark.skipif(
    not math_verify_is_installed(), reason="needs math-verify, the extra `math`"
)


@needs_math_verify
@pytest.mark.parametrize(
    ("label", "text", "score"),
    [
        (r"\frac{1}{2}", "so it is $0.5$", 1.0),
        (r"\frac{1}{2}", r"\boxed{1/2}", 1.0),
        ("x+1", "<answer>1+x</answer>", 1.0),
        ("We add.\n#### 72", "The answer is 72.", 1.0),
        ("72", r"\boxed{73}", 0.0),
        ("72", "", 0.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("34", "34 or 35? \\boxed{35}", 0.0),
    ],
)
def test_math_verify_compares_as_mathematics(label: str, text: str, score: float) -> None:
    assert MathVerifyScorer().score(label, text) == score


@needs_math_verify
def test_a_label_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="math-verify can make nothing of the label ''"):
        MathVerifyScorer().score("", "7")


def test_without_math_verify_its_scorer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "math_verify_is_installed", lambda: False)
    with pytest.raises(TaskError, match="math-verify is not installed: it comes with"):
        MathVerifyScorer()


TEXTS = st.text(st.sampled_from("07.,-$#{}<>/ \n\\boxedanswr\N{MINUS SIGN}é"), max_size=60)


@given(TEXTS, TEXTS)
def test_any_text_has_a_score_of_one_or_nothing(label: str, text: str) -> None:
    assert {ExactScorer(where).score(label, text) for where in WHERE} <= {0.0, 1.0}


@given(
    st.integers(),
    st.sampled_from(["{}", "so {}", "= {}.", "<answer>{}</answer>", r"\boxed{{{}}}", "#### {}"]),
)
def test_every_integer_is_found_in_every_form(value: int, form: str) -> None:
    assert ExactScorer("exact").score(str(value), form.format(value)) == 1.0
    assert ExactScorer("exact").score(str(value + 1), form.format(value)) == 0.0
    assert ExactScorer("exact").score(f"{value:,}", form.format(value)) == 1.0
    assert number(f"{value:,}.00") == str(value)
