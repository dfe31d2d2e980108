"""`cory report`: the contents of the page for many kinds of runs, and that it is self-contained."""

import json
import math
import os
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from launch.commands.report import report
from launch.display.frame import mean_over_seeds
from launch.display.texts import replace_control_chars
from launch.main import main
from launch.report.runs import group_arms, read_reported_run, read_runs, short_run_names
from launch.report.tables import arm_rows, environment_rows
from launch.run_folder.environment import describe_environment
from launch.run_folder.layout import METRICS
from launch.run_folder.manifest import own_version
from launch.run_folder.run import Run
from tests.launch.conftest import Cory, record_test_run
from tests.paper import paper_settings

CHROMIUM = shutil.which("chromium")
HOSTILE = "<script>document.title = 'hacked'</script> & \x00\x1b[31m \u202eabc 日本語"


class ParsedPage(HTMLParser):
    """Collects a page's tags, links and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def append_sample(run: Run, update: int, text: str) -> None:
    responses = [
        {"role": role, "policy": policy, "text": text, "task_reward": None}
        for role, policy in zip(run.settings().agents, run.settings().policy_ids, strict=True)
    ]
    run.samples.append({"update": update, "held_out": False, "query": HOSTILE, "responses": responses})


def write_report(tmp_path: Path, *runs: Run) -> str:
    """Writes the report of runs, and returns the HTML."""
    report([str(run.path) for run in runs], tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_that_differ_only_in_the_seed_are_one_arm(tmp_path: Path) -> None:
    folders = {
        "a": paper_settings(seed=1, num_agents=1),
        "b": paper_settings(seed=1),
        "c": paper_settings(seed=2, num_updates=7, samples_every=1),
        "d": paper_settings(seed=1, lr=1e-3, exchange_period=None),
    }
    for name, settings in folders.items():
        record_test_run(tmp_path / name, settings, updates=range(2))
    arms = group_arms([read_reported_run(tmp_path / name, name) for name in folders])
    assert [(arm.label, [run.name for run in arm.runs]) for arm in arms] == [
        ("PPO", ["a"]),
        ("CORY", ["b", "c"]),
        ("CORY, exchange_period=null, lr=0.001", ["d"]),
    ]


def test_arms_that_differ_in_one_setting_are_labelled_with_it(tmp_path: Path) -> None:
    runs = []
    for period in (1, 5, None):
        record_test_run(tmp_path / str(period), paper_settings(exchange_period=period), updates=range(2))
        runs.append(read_reported_run(tmp_path / str(period), str(period)))
    assert [arm.label for arm in group_arms(runs)] == [f"exchange_period={value}" for value in (1, 5, "null")]


def test_long_labels_of_arms_are_shortened_for_plots(tmp_path: Path) -> None:
    many_changes = paper_settings(
        task="custom", data="questions.csv", prompt="{query} " * 9, lr=1e-3, num_epochs=1, clip_ratio=0.1, gamma=0.9
    )
    runs = []
    for name, settings in (("default", paper_settings()), ("changed", many_changes)):
        record_test_run(tmp_path / name, settings, updates=range(2))
        runs.append(read_reported_run(tmp_path / name, name))
    assert [arm.label for arm in group_arms(runs)] == ["CORY", "task=custom, data=questions.csv, …"]


def test_names_of_runs_are_the_shortest_distinct_path_suffixes() -> None:
    assert short_run_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert short_run_names([Path("/x/a/run"), Path("/x/b/other")]) == ["run", "other"]


def test_means_and_intervals_use_the_seeds_with_values() -> None:
    runs = {"a": {1: 1.0, 2: 4.0}, "b": {1: 2.0, 2: math.nan}, "c": {1: 3.0, 2: 6.0}}
    values = pd.concat({run: pd.Series(curve) for run, curve in runs.items()}, names=["run", "update"])
    means = mean_over_seeds(values)
    assert list(means.index) == [1, 2] and list(means["mean"]) == [2.0, 5.0]
    # t(0.975, 2) = 4.3027; the standard error of 1, 2 and 3 is 1 / √3.
    assert means["low"][1] == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-4)
    assert means["high"][1] == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=1e-4)
    assert math.isnan(means["low"][2])  # only two seeds


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of different kinds of runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        record_test_run(
            folder / "<b>",
            paper_settings(num_agents=8, task="custom", data="$\\frac$.jsonl", reward="a:b", prompt="$x_1$"),
        ),
        record_test_run(folder / "finished", paper_settings(seed=1, num_updates=12, lr=3e-5)),
        record_test_run(folder / "short", paper_settings(seed=2, num_updates=12, lr=3e-5), updates=range(4)),
        record_test_run(folder / "other", paper_settings(seed=1, num_updates=12, lr=1e-5, kl_coef=0.1)),
        record_test_run(folder / "unevaluated", paper_settings(num_agents=1, num_updates=12), updates=range(1, 5)),
        record_test_run(folder / "begun", paper_settings(num_agents=3, num_updates=12), updates=[]),
    ]
    broken = runs[1].updates()[-1]
    broken["policy"]["llm_1"] = dict.fromkeys(broken["policy"]["llm_1"])
    runs[1].metrics.append({**broken, "update": 13})
    append_sample(runs[0], 5, HOSTILE)
    append_sample(runs[0], 10, " \n")
    append_sample(runs[1], 5, "a a a")
    return write_report(folder, *runs)


def test_every_role_and_policy_of_a_chain_is_on_the_page(html: str) -> None:
    settings = paper_settings(num_agents=8)
    text = ParsedPage(html).text
    assert all(f"{role} · {policy}" in text for role, policy in zip(settings.agents, settings.policy_ids, strict=True))
    assert all(f"</svg> {name}</li>" in html for name in (*settings.agents, *settings.policy_ids))  # in legends


def test_roles_and_role_exchanges_are_shown_only_for_chains(tmp_path: Path, html: str) -> None:
    assert ": by role<" in html and "> role exchange</li>" in html
    ppo_html = write_report(tmp_path, record_test_run(tmp_path / "run", paper_settings(num_agents=1, num_updates=12)))
    assert ": by role<" not in ppo_html and "> role exchange</li>" not in ppo_html and "PPO: by policy<" in ppo_html


def test_the_page_loads_no_external_resources(html: str) -> None:
    assert not re.findall(r"[a-z]+://[^\s\"'<>]*", re.sub(r"xmlns(:xlink)?=\"[^\"]*\"", "", html))
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert all(link.startswith("#") for link in ParsedPage(html).links)


def test_texts_of_models_and_users_are_escaped(html: str) -> None:
    page = ParsedPage(html)
    assert page.tags.count("script") == 1 and "b" not in page.tags
    assert page.text.count("<script>document.title = 'hacked'</script>") == 3 + 8
    assert "日本語" in page.text and page.text.count("(empty)") == 8
    assert not re.search(r"[\x00\x1b]", page.text)
    assert replace_control_chars("a\tb\n\ud800\r") == "a\tb\n��"


def test_the_page_warns_about_runs_that_are_not_comparable(html: str) -> None:
    text = ParsedPage(html).text
    assert "Not finished, so shown only in the curves: short." in text and "1 of 2" in text and "3 of 12" in text
    assert "preliminary: <b>, unevaluated, begun." in text and "0 of 12" in text
    assert "use different KL weights (η = 0.1, 0.3)" in text
    assert "differ in task, data or reward" in text


def test_differing_settings_come_first_and_all_settings_are_listed(html: str) -> None:
    text = ParsedPage(html).text
    assert text.index("Differences\n") < text.index("All settings of")
    assert text.count("lora_alpha: 32.0") == 5 and "cory train" in text


def test_runs_with_the_same_environment_share_one_entry(tmp_path: Path) -> None:
    runs = [
        record_test_run(tmp_path / name, paper_settings(seed=seed, num_updates=12)) for seed, name in enumerate("abc")
    ]
    for run, cores in zip(runs, (2, 2, 4), strict=True):
        run.write_settings(run.settings(), f"cory train --resume {run.path.name}  # torch 2.13.0; a CPU, {cores} cores")
    reported_runs = [read_reported_run(run.path, run.path.name) for run in runs]
    assert reported_runs[0].commands == ["cory train", "cory train --resume a"]
    assert environment_rows(reported_runs) == [
        ("a, b", {"software and hardware": "torch 2.13.0; a CPU, 2 cores"}),
        ("c", {"software and hardware": "torch 2.13.0; a CPU, 4 cores"}),
    ]
    assert (
        f"cory-rllib {own_version()}" in describe_environment()
        and f", {os.cpu_count()} cores, " in describe_environment()
    )


def test_plots_are_saved_as_png(tmp_path: Path) -> None:
    runs = [
        record_test_run(tmp_path / str(seed), paper_settings(num_agents=1, num_updates=12, seed=seed))
        for seed in (1, 2)
    ]
    report([str(run.path) for run in runs], tmp_path / "r.html", tmp_path / "png")
    images = {file.stem: imread(file) for file in (tmp_path / "png").iterdir()}
    assert set(images) == {"pareto", "curves-1-policies", "health"}
    assert all(image.shape[1] > 800 and image[..., :3].std() > 0.05 for image in images.values())


def test_a_single_run_is_shown_before_and_after_training_with_the_last_answer_of_its_chain(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(num_updates=12))
    lines = run.updates()
    for line, reward in ((lines[0], 0.125), (lines[12], 0.875)):
        line["last_response"] = {
            **{"task_reward": reward, "combined_reward": reward - 0.5},
            **{"bare_kl": 3.25, "in_chain_kl": 9.0},
        }
    (run.path / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    html = write_report(tmp_path, run)
    cells = [" ".join(row.split()) for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)]
    number = '<td class="number">{}</td>'.format
    main_row, before_and_after = (next(cell for cell in cells if label in cell) for label in (": last answer", ">last"))
    assert all(number(text) in main_row for text in ("+0.88", "3.25", "+0.38"))
    for text in ("+0.12 → +0.88", "3.25 → 3.25", "-0.38 → +0.38"):
        assert number(text) in before_and_after, before_and_after
    assert "updates 0 → 12" in html and "Task reward against KL" not in html  # one dot would say nothing
    write_report(tmp_path, run, record_test_run(tmp_path / "other", paper_settings(seed=1, num_updates=12)))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Before and after" not in html and "Task reward against KL" in html and ": last answer" in html


def test_a_diverged_run_counts_as_collapsed_and_has_no_final_metrics(tmp_path: Path) -> None:
    record_test_run(tmp_path / "finished", paper_settings(seed=1, num_updates=12))
    for name, rejected_update in (("diverged", 7), ("continued", 5)):
        run = record_test_run(
            tmp_path / name, paper_settings(seed=2 if name == "continued" else 3, num_updates=12), updates=range(7)
        )
        (run.path / f"refused_update_{rejected_update:06d}_llm_2.safetensors").touch()
    folders = [tmp_path / name for name in ("finished", "diverged", "continued")]
    (arm,) = group_arms(read_runs(folders))
    assert [(run.name, run.state) for run in arm.runs] == [
        ("finished", "done"),
        ("continued", "unfinished"),
        ("diverged", "diverged"),
    ]
    assert [run.name for run in arm.counted] == ["finished", "diverged"]
    (row,) = arm_rows([arm])
    assert row["collapsed"] == 1 and row["figures"][0].small == "1 of 2"
    report([str(folder) for folder in folders], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "diverged<small>The gradient of llm_2 was not finite in update 7.</small>" in html


def test_runs_are_named_by_the_last_parts_of_their_path_or_uri(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        record_test_run(tmp_path / name, paper_settings(num_agents=1, num_updates=12))
    runs = read_runs([f"file://{tmp_path}/a/run", tmp_path / "b" / "run"])
    assert [(run.name, len(run.updates)) for run in runs] == [("a/run", 13), ("b/run", 13)]
    assert short_run_names(["s3://bucket/one?region=here", "s3://bucket/two/?region=here"]) == ["one", "two"]


def test_report_prints_the_path_of_the_page(cory_in_process: Cory, tmp_path: Path) -> None:
    record_test_run(tmp_path / "run", paper_settings(num_agents=1, num_updates=12)).unlock()
    result = cory_in_process("report", "run", "--out", "out/here.html")
    assert (result.returncode, result.stdout) == (0, "out/here.html\n"), result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["here.html"]


def test_invalid_runs_are_rejected_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record_test_run(tmp_path / "run", paper_settings(num_updates=12))
    record_test_run(tmp_path / "empty", paper_settings(), updates=[])
    (tmp_path / "report.html").write_text("an older one")
    record_test_run(tmp_path / "truncated", paper_settings(num_updates=12)).final.write_text('{"update": 12, "pol')
    columns = {"update": 12, "policy": {"llm_1": {"query": [0], "figures": {"task_reward": [1.0]}}}}
    record_test_run(tmp_path / "columns", paper_settings(num_updates=12)).final.write_text(json.dumps(columns))
    for words, reason in {
        ("run", "missing"): "missing is not a run's folder: it does not exist",
        ("run", "report.html"): "report.html is not a run's folder: it is a file",
        ("empty",): "empty has no metrics yet",
        ("run", "--out", "run/config.yaml/x.html"): "run/config.yaml cannot be created: File exists",
        ("run", "--out", "empty"): "empty is a folder",
        ("truncated",): "truncated/final.json is damaged: ",
        ("columns",): "columns/final.json is damaged: ",
    }.items():
        assert main(["report", *words]) == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "an older one"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_the_width_of_the_browser_window(tmp_path: Path, width: int) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(num_agents=4, num_updates=12))
    append_sample(run, 5, "x" * 300)
    page = write_report(tmp_path, run)
    script = """<script>onload = () => {
        const page = frames[0].document;
        page.querySelectorAll("details").forEach(section => section.open = true);
        const texts = [...page.querySelectorAll(".panels text")].map(text => text.getBoundingClientRect().height);
        const plots = [...page.querySelectorAll(".panels svg")].map(plot => plot.getBoundingClientRect().right);
        document.title = [
            frames[0].innerWidth, page.documentElement.scrollWidth, Math.min(...texts), Math.max(...plots)];
    }</script>"""
    # Chromium windows are at least 500 pixels wide; frames can be narrower.
    frame = f'<iframe style="border: 0" width={width} height=900 srcdoc="{escape(page)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html>{frame}{script}", encoding="utf-8")
    inner, content, letters, right = map(float, title_in_browser(tmp_path, "frame.html").split(","))
    assert inner == width and content <= width and right <= width
    assert letters > 9  # pixels of the smallest text of a plot


def title_in_browser(folder: Path, page: str) -> str:
    """Returns the title of a page after its scripts have run."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1400,1000", "--dump-dom", (folder / page).as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    titles = re.findall(r"<title>(.*?)</title>", dom)
    assert titles, dom[:1000]
    return titles[0]
