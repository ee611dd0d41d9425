"""`unison bench`, which has left for a command of its own."""


def test_the_new_command_is_named_with_the_options_that_were_given(unison):
    code, out, err = unison("bench", "parity", "--private", "--out", "a b.json")
    assert (code, out) == (2, "")
    assert err.startswith("unison: ")
    assert err.strip().endswith("python -m bench parity --private --out 'a b.json'")


def test_help_of_the_old_command_names_the_new_one(unison):
    code, _, err = unison("bench", "--help")
    assert (code, "python -m bench --help" in err) == (2, True)
