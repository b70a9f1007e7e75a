//! `eaglet plan` as a user runs it, on the journal of the story that this project comes from: 488 of 88,000 answers of
//! eight datasets, 26 a minute, with 150 requests in flight of which 50 run.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

const DATASETS: [&str; 8] = [
    "b1_glaive",
    "b2_alpaca",
    "b3_ultrachat",
    "b4_wildchat",
    "b5_sharegpt",
    "b6_code",
    "b7_openthoughts",
    "b8_sweagent",
];
const EACH: usize = 11_000;
const PER_MINUTE: f64 = 26.0;
const BEGAN: f64 = 1.7e9;

/// Mean 1,416, median 646, deviation about 1,640, 19 over 5,000 and one at the cap.
fn story_lengths() -> Vec<usize> {
    let short = (0..244).map(|i| 40.0 + 605.0 * (f64::from(i) / 243.0).powf(0.8));
    let middle = (0..225).map(|i| 647.0 + 4343.0 * (f64::from(i) / 224.0).powf(2.004));
    let long = (0..18).map(|i| 5010.0 + 2990.0 * f64::from(i) / 17.0);
    short.chain(middle).chain(long).map(|tokens| f64::round(tokens) as usize).chain([10_240]).collect()
}

/// Writes the capture's folder and a recipe beside it.
fn story(folder: &Path) -> PathBuf {
    let out = folder.join("capture");
    std::fs::create_dir_all(&out).unwrap();
    let lengths = story_lengths();
    let mut journal = std::fs::File::create(out.join("journal.jsonl")).unwrap();
    let mut status = std::fs::File::create(out.join("status.jsonl")).unwrap();
    let server = |in_flight: usize| {
        json!({"url": "http://gpus:30000", "up": true, "limit": 150, "in_flight": in_flight, "running": 50,
               "waiting": 100, "kv_use": 0.97, "room": 50.0})
    };
    let mut tokens = 0;
    for n in 0..lengths.len() {
        // A prime step takes every length once, in no order.
        let length = lengths[n * 197 % lengths.len()];
        tokens += length;
        let at = BEGAN + (n + 1) as f64 * 60.0 / PER_MINUTE;
        // 100 in the queue before it, then 12 tokens a second.
        let asked = (at - length as f64 / 12.3 - 100.0 * 60.0 / PER_MINUTE).max(BEGAN);
        let prompt: Vec<usize> = (0..2400).map(|i| n + i).collect();
        let row = json!({
            "id": format!("p{n}"), "dataset": DATASETS[n % 8], "prompt_ids": prompt, "output_ids": vec![7; length],
            "finish_reason": if length == 10_240 { "length" } else { "stop" }, "sampling": null, "segments": [],
            "took": {"class": "", "max_tokens": 10_240, "asked": asked, "seconds": at - asked, "in_flight": 150, "server": 0},
        });
        writeln!(journal, "{row}").unwrap();
        let row = json!({
            "at": at, "run": BEGAN, "groups": [], "servers": [server(150)], "tokens": tokens, "prompt_tokens": 2400 * (n + 1),
            "tokens_per_s": 613.0, "failed": 0, "retries": 0, "answers": n + 1, "reasoned": 0, "capped": 0,
            "histogram": [], "left": null,
        });
        writeln!(status, "{row}").unwrap();
    }
    // The story tells nothing of the answers in flight, so nothing is known of them here.
    let flights = json!({"at": BEGAN, "streaming": true, "flights": []});
    std::fs::write(out.join("in_flight.json"), flights.to_string()).unwrap();
    let groups = DATASETS.map(|dataset| {
        json!({"class": "", "dataset": dataset, "done": 61, "wanted": EACH, "tokens": 0, "in_flight": 0,
               "max_tokens": 10_240})
    });
    let facts = json!({
        "model": "kimi-k2.5", "served_as": "kimi-k2.5", "version": "0.5", "context": 262_144, "kv_tokens": 200_000,
        "max_running": null, "vocab_size": 163_840, "kv_bytes_per_token": null, "kv_dtype": "auto",
        "memory_fraction": 0.85, "gpus": 8, "hierarchical_cache": false,
    });
    let run = json!({
        "identity": {"model": "kimi-k2.5", "context": 262_144, "vocab_size": 163_840, "probe": []}, "engine": "sglang",
        "rendered_by": "server", "thinking": "on", "servers": [facts], "concurrency": 150, "groups": groups,
        "duplicates": 0, "skipped": 0, "left_off": 0,
    });
    std::fs::write(out.join("run.json"), run.to_string()).unwrap();
    let recipe = folder.join("kimi.toml");
    let text = "[target]\nfamily = \"kimi-k2.5\"\n[capture]\nengine = \"sglang\"\nservers = [\"http://gpus:30000\"]\n\
                render = \"server\"\nprompts = []\nout = \"capture\"\nmax_tokens = 10240\nconcurrency = 150\n";
    std::fs::write(&recipe, text).unwrap();
    recipe
}

fn plan(recipe: &Path, arguments: &[&str]) -> Output {
    let recipe = recipe.to_str().unwrap();
    let arguments = [&["plan", "--recipe", recipe], arguments].concat();
    Command::new(env!("CARGO_BIN_EXE_eaglet")).args(arguments).output().unwrap()
}

#[test]
fn the_story_is_seen_early() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = story(folder.path());
    let told = plan(&recipe, &["--json"]);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    let text = String::from_utf8(plan(&recipe, &[]).stdout).unwrap();
    println!("{text}");

    let figure =
        |path: &str| told.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path} in {told}"));
    assert!((figure("/lengths/mean") - 1416.0).abs() < 2.0);
    assert!((figure("/lengths/median") - 646.0).abs() < 1.0);
    assert!((figure("/lengths/deviation") - 1640.0).abs() < 10.0);
    // 88,000 answers at 26 a minute are 56.4 hours, which the story calls 57.
    assert!((figure("/hours/middle") - 57.0).abs() < 2.0, "{}", figure("/hours/middle"));
    assert!((figure("/hours/low")..figure("/hours/high")).contains(&57.0));
    assert!((124e6..125e6).contains(&figure("/tokens/middle")), "{}", figure("/tokens/middle"));
    assert_eq!(told["levers"][0]["name"], "over_subscription");
    assert!(text.contains("150 requests are in flight and 50 of them run, 100 only queue"), "{text}");
    let levers = told["levers"].as_array().unwrap();
    let cap = levers.iter().find(|l| l["title"] == "cap answers at 5000 tokens").expect("a cap of 5,000");
    assert!(cap["cost"].as_str().unwrap().contains("cuts 3.9% of answers (19 of 488"), "{cap}");
    let thinking = told["warnings"][0].as_str().unwrap();
    assert!(thinking.starts_with("none of 488 answers carries reasoning"), "{thinking}");
    assert_eq!(figure("/disk/bytes_per_token"), 57_344.0);
}

#[test]
fn without_a_capture_it_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = story(folder.path());
    std::fs::remove_dir_all(folder.path().join("capture")).unwrap();
    let told = plan(&recipe, &[]);
    assert!(!told.status.success());
    assert!(String::from_utf8_lossy(&told.stderr).contains("--pilot"), "{}", String::from_utf8_lossy(&told.stderr));
}

#[test]
fn a_budget_is_kept_by_the_recipe_it_writes() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = story(folder.path());
    let told = plan(&recipe, &["--budget", "24h"]);
    let text = String::from_utf8(told.stdout).unwrap();
    println!("{}", &text[text.find("To keep a budget").expect("a proposal")..]);
    let written = folder.path().join("kimi.24h.toml");
    let again = plan(&written, &["--json"]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    println!("{} {}", again["hours"], again["tokens"]);
    let (high, middle) = (again["hours"]["high"].as_f64().unwrap(), again["hours"]["middle"].as_f64().unwrap());
    // With certainty, and without giving up more than that takes.
    assert!(high <= 24.0 && high > 22.5 && middle > 18.0, "{}", again["hours"]);
    let groups = again["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 8);
    for (group, dataset) in groups.iter().zip(DATASETS) {
        assert_eq!(group["dataset"], dataset);
        assert_eq!(group["done"], 61);
        assert!(group["wanted"].as_u64().unwrap() > 3000, "{group}");
    }
    // The recipe keeps about as many in flight as there is room for.
    let text = std::fs::read_to_string(&written).unwrap();
    assert!(text.contains("concurrency = \"auto\""), "{text}");

    // A budget in tokens counts what is there already.
    let told =
        plan(&recipe, &["--budget", "60Mtok", "--json", "--out", folder.path().join("less.toml").to_str().unwrap()]);
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert!(told["budget"]["tokens"]["high"].as_f64().unwrap() <= 60e6, "{}", told["budget"]);
    assert!(folder.path().join("less.toml").exists());
}

#[test]
fn budgets_that_cannot_be_kept_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = story(folder.path());
    let words = |budget: &str| {
        let told = plan(&recipe, &["--budget", budget]);
        assert!(!told.status.success());
        String::from_utf8(told.stderr).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(words("a day").contains("`a day` is no budget"), "{}", words("a day"));
    let few = words("30min");
    assert!(few.contains("30 min are too few") && few.contains("are needed"), "{few}");
    assert!(!folder.path().join("kimi.30min.toml").exists());
    // Where there is enough, nothing is given up.
    let told = plan(&recipe, &["--budget", "9d", "--json"]);
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["budget"]["fits_as_is"], true);
    assert!(folder.path().join("kimi.9d.toml").exists());
}

#[test]
fn the_page_is_whole_in_itself() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = story(folder.path());
    let page = folder.path().join("plan.html");
    let done = plan(&recipe, &["--html", page.to_str().unwrap()]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.matches("<svg").count() == 2 && page.contains("b8_sweagent") && page.contains("class=\"band\""));
    assert!(page.contains("<td class=\"l\">") && page.ends_with("</html>\n"));
    assert!(!page.contains("http") && !page.contains("NaN") && !page.contains("inf "), "it fetches nothing");
}
