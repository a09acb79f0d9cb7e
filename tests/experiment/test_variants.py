import pytest

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.experiment import load_preset, presets
from fedcore.experiment.presets import at_scale, merged


def test_a_table_that_names_something_else_takes_the_others_place():
    below = {"data": {"name": "a", "x": 1}, "local": {"batch": 2, "epochs": 1}}
    assert merged(below, {"data": {"name": "b"}}) == {"data": {"name": "b"}, "local": {"batch": 2, "epochs": 1}}
    assert merged(below, {"data": {"name": "a", "y": 2}})["data"] == {"name": "a", "x": 1, "y": 2}
    assert merged(below, {"local": 3})["local"] == 3
    assert below == {"data": {"name": "a", "x": 1}, "local": {"batch": 2, "epochs": 1}}


def test_variants_are_the_product_of_their_tables():
    axes = [{"a": {"about": "A"}, "b": {"rounds": 2}}, {"x": {"about": "X", "rounds": 3}}]
    found = presets.variants("f", {"title": "T", "rounds": 1, "variants": axes})
    assert found == {"f-a-x": {"title": "T: A, X", "rounds": 3}, "f-b-x": {"title": "T: X", "rounds": 3}}


def test_a_family_is_what_differs_in_one_table_alone():
    values = {"p1": {"varies": {"p": 0.1}}, "p9": {"about": "nearly all", "varies": {"p": 0.9}}}
    axes = [{"a": {"about": "A"}, "b": {"about": "B"}}, values, {"x": {}}]
    found = presets.variants("f", {"title": "T", "variants": axes})
    assert [tables["title"] for tables in found.values()][:2] == ["T: A, p = 0.1", "T: A, nearly all"]
    assert found["f-b-p9-x"]["pictures"]["varied"] == {"family": "f-b-x", "title": "T: B", "label": "p", "value": 0.9}


def test_what_the_base_varies_is_not_what_the_preset_varies():
    assert load_preset("mimic/figure6-p10").pictures.varied.value == 0.1
    assert load_preset("mimic/figure7").pictures.varied is None
    assert load_preset("mimic/figure7").pictures.over == "uploadings"
    families = {}
    for name in presets.names():
        if varied := load_preset(name).pictures.varied:
            families.setdefault((varied.family, varied.label), []).append(varied.value)
    assert families["mimic/table3", "tau_max"] == [20, 50, 100]
    assert families["momentum/figure5", "S"] == [100, 10, 5]
    assert families["flexible/table5-0.1", "round of the departure"] == list(range(10, 51, 5))
    assert all(len(values) == len(set(values)) > 1 for values in families.values())


def leaves(tables):
    for value in tables.values() if isinstance(tables, dict) else tables:
        if isinstance(value, dict | list | tuple):
            yield from leaves(value)
        else:
            yield value


def test_what_a_preset_varies_has_that_value_in_it():
    for name in presets.names():
        tables = load_preset(name).model_dump(mode="json")
        if varied := tables["pictures"]["varied"]:
            due = varied["value"] / 100 if "%" in varied["label"] else varied["value"]
            if varied["label"] == "zeta":
                zeta = load_preset(name).network.topology(tables["partition"]["clients"]).zeta
                assert varied["value"] == pytest.approx(zeta, abs=5e-4), name
                continue
            if varied["label"] == "S" and tables["participation"]["name"] == "Always":
                due = tables["partition"]["clients"]
            assert due in leaves({key: tables[key] for key in ("partition", "participation")}), name


@pytest.mark.parametrize(
    "change", ["participation.tau_max=500", "partition.clients=20", "grid={'partition.clients'=[5]}"]
)
def test_a_preset_that_is_changed_in_what_families_differ_in_is_of_none(change):
    assert load_preset("mimic/table3-tau20", [change]).pictures.varied is None
    kept = load_preset("mimic/table3-tau20", ["rounds=3", "rate.lr=0.1", "grid={'rate.lr'=[0.2]}"]).pictures
    assert kept == load_preset("mimic/table3-tau20").pictures


@pytest.mark.parametrize(
    "axes",
    [
        [{"a": {"varies": {"p": 1, "q": 2}}}],
        [{"a": {"varies": {"p": 1}}}, {"b": {"varies": {"q": 1}}}],
        [{"a": {"varies": {}}}],
    ],
)
def test_one_table_varies_one_number(axes):
    with pytest.raises(ConfigError, match="one number in it"):
        presets.variants("f", {"title": "T", "variants": axes})


def test_the_small_scale_lies_on_everything_else():
    tables = {"rounds": 9, "local": {"steps": 3}, "quick": {"local": {"steps": 1}}}
    assert at_scale(tables, "quick") == {"rounds": 9, "local": {"steps": 1}}
    assert at_scale(tables, "full") == {"rounds": 9, "local": {"steps": 3}}
    assert at_scale({"rounds": 9}, "quick") is None


@pytest.mark.parametrize("file", [file for file, _ in presets.files() if file != "quickstart"])
def test_every_paper_preset_has_a_small_scale(file):
    for name in presets.names():
        if name == file or name.startswith(f"{file}-"):
            quick, full = load_preset(name, scale="quick"), load_preset(name)
            assert quick.rounds * len(quick.seeds) < full.rounds * len(full.seeds)
            assert [method.label for method in quick.algorithms] == [method.label for method in full.algorithms]


def test_a_preset_says_what_its_base_says_but_for_its_own_keys():
    low, high = load_preset("mimic/table3-tau20"), load_preset("mimic/table3-tau100")
    assert (low.participation.options["tau_max"], high.participation.options["tau_max"]) == (20, 100)
    changed = {"name", "title", "participation", "pictures"}
    assert low.model_dump(exclude=changed) == high.model_dump(exclude=changed)
    assert load_preset("mimic/figure7").participation == load_preset("mimic/figure6-p10").participation


def test_a_file_of_ones_own_may_stand_on_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "mimic/table3-tau20"\n[local]\nbatch = 64\n[quick]\nseeds = [7]\n')
    mine = load_preset(file, scale="quick")
    assert (mine.local.batch, mine.local.epochs, mine.seeds, mine.rounds) == (64, 5, (7,), 60)
    assert mine.name == "mine"  # a sweep keeps it in its own folder, wherever the file is
    assert mine.pictures.varied is None
    file.write_text('base = "mimic/table3-tau21"')
    with pytest.raises(UnknownNameError, match=r"did you mean 'mimic/table3-tau20'\? \(known: see `fedcore list`\)"):
        load_preset(file)
    with pytest.raises(UnknownNameError, match="several: take one of mimic/table3-tau20, mimic/table3-tau50"):
        load_preset("mimic/table3")


def test_a_scale_that_is_not_there():
    with pytest.raises(ConfigError, match="expected a table 'quick'"):
        load_preset("quickstart", scale="quick")
    with pytest.raises(UnknownNameError, match="scale"):
        load_preset("quickstart", scale="tiny")


def test_reading_a_preset_leaves_it_as_it_was():
    load_preset("mimic/table3-tau20", ["participation.tau_max=3"])
    assert load_preset("mimic/table3-tau20").participation.options["tau_max"] == 20
