//! `eaglet train` as a user runs it, on a tiny target.

mod tiny;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn run(recipe: &Path, arguments: &[&str]) -> Output {
    let recipe = recipe.to_str().unwrap();
    tiny::eaglet(&[&["train", "--recipe", recipe], arguments].concat()).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The bytes that a run ends with: the newest checkpoint's weights and moments, and the exported head.
fn last_bytes(run: &Path) -> Vec<Vec<u8>> {
    let mut checkpoints: Vec<_> =
        std::fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).collect();
    checkpoints.sort();
    let newest = checkpoints.last().unwrap();
    let files = [newest.join("weights.safetensors"), newest.join("optimizer.safetensors")];
    files.iter().chain([&run.join("head/model.safetensors")]).map(|file| std::fs::read(file).unwrap()).collect()
}

fn steps_taken(run: &Path) -> usize {
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    metrics.lines().filter(|line| line.contains("\"gradient_norm\"")).count()
}

#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 24);
    let whole = run(&recipe, &["--set", "train.out=whole"]);
    assert!(whole.status.success(), "{}", text(&whole));
    assert!(text(&whole).contains("acceptance length"), "{}", text(&whole));
    let expected = last_bytes(&folder.path().join("whole"));
    let total = steps_taken(&folder.path().join("whole"));
    assert!(total > 60, "{total} steps are too few to be killed in");

    // Moments that differ from run to run; each is printed, so that a failure can be repeated.
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos() as usize;
    for round in 0..3 {
        let out = folder.path().join(format!("killed{round}"));
        let set = format!("train.out=killed{round}");
        let mut kills = Vec::new();
        for kill in 0..2 {
            let after = steps_taken(&out) + 1 + (clock / (1 + kill + 7 * round)) % (total / 3);
            let arguments = ["train", "--recipe", recipe.to_str().unwrap(), "--set", &set, "--resume"];
            let mut child = tiny::eaglet(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let begun = Instant::now();
            while steps_taken(&out) < after && child.try_wait().unwrap().is_none() {
                assert!(begun.elapsed() < Duration::from_secs(120), "the run does not get to step {after}");
                std::thread::sleep(Duration::from_millis(1));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills.push(after);
        }
        let resumed = run(&recipe, &["--set", &set, "--resume"]);
        assert!(resumed.status.success(), "killed after {kills:?}: {}", text(&resumed));
        assert!(last_bytes(&out) == expected, "killed after steps {kills:?}: other bytes");
        assert_eq!(steps_taken(&out), total, "killed after steps {kills:?}: metrics.jsonl");
    }
}

#[test]
fn a_signal_saves_and_says_how_to_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 24);
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let out = folder.path().join(signal);
        let set = format!("train.out={signal}");
        let arguments = ["train", "--recipe", recipe.to_str().unwrap(), "--set", &set, "--set", "train.epochs=2000"];
        let child = tiny::eaglet(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while steps_taken(&out) < 3 {
            assert!(begun.elapsed() < Duration::from_secs(120), "the run does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        assert!(text(&output).contains("--resume"), "{}", text(&output));
        assert!(out.join("checkpoints").read_dir().unwrap().next().is_some());
    }
}

#[test]
fn what_the_checkpoint_cannot_honour_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 8);
    let first = run(&recipe, &["--set", "train.max_steps=6"]);
    assert!(first.status.success(), "{}", text(&first));
    // Not by accident over an existing run.
    let again = run(&recipe, &[]);
    assert!(!again.status.success() && text(&again).contains("--resume"), "{}", text(&again));
    let changed = run(&recipe, &["--resume", "--set", "train.lr=0.5"]);
    assert!(!changed.status.success(), "{}", text(&changed));
    assert!(text(&changed).contains("train.lr") && text(&changed).contains("0.5"), "{}", text(&changed));
    let evaluated_otherwise = run(&recipe, &["--resume", "--set", "train.max_steps=6", "--set", "evaluate.k=2"]);
    assert!(evaluated_otherwise.status.success(), "{}", text(&evaluated_otherwise));
    // Other sequences.
    let train = folder.path().join("train.jsonl");
    let lines = std::fs::read_to_string(&train).unwrap();
    std::fs::write(&train, lines.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let other = run(&recipe, &["--resume", "--set", "train.max_steps=6"]);
    assert!(!other.status.success() && text(&other).contains("training sequences"), "{}", text(&other));
}

#[test]
fn a_loss_that_is_no_number_stops_with_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 8);
    let output = run(&recipe, &["--set", "train.lr=1e38", "--set", "train.clip=0", "--set", "train.warmup=0"]);
    assert!(!output.status.success(), "{}", text(&output));
    let said = text(&output).replace(['\n', '│'], " ");
    assert!(said.contains("not finite at step") && said.contains('t') && said.contains("checkpoint"), "{said}");
}

#[test]
fn a_trained_head_is_a_start_for_another_run_and_is_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 8);
    let first = run(&recipe, &["--set", "train.max_steps=4"]);
    assert!(first.status.success(), "{}", text(&first));
    let more =
        run(&recipe, &["--set", "train.init_from=run/head", "--set", "train.out=more", "--set", "train.max_steps=2"]);
    assert!(more.status.success() && text(&more).contains("starting from"), "{}", text(&more));

    let recipe = recipe.to_str().unwrap();
    let evaluated = tiny::eaglet(&["evaluate", "--recipe", recipe, "--k", "1,3", "--temperature", "0,0.8", "--json"])
        .output()
        .unwrap();
    assert!(evaluated.status.success(), "{}", text(&evaluated));
    let json: serde_json::Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    let decoded = json["decoded"].as_array().unwrap();
    assert_eq!(decoded.len(), 4);
    for report in decoded.iter().filter(|r| r["temperature"] == 0.0) {
        assert_eq!(report["identical_outputs"], report["prompts"]);
        assert!(report["acceptance_length"].as_f64().unwrap() >= 1.0);
    }
    assert!(json["offline"]["all"]["rows"].as_u64().unwrap() > 0);

    let exported =
        tiny::eaglet(&["export", "--recipe", recipe, "--set", "export.out=again", "--set", "train.max_steps=4"])
            .output()
            .unwrap();
    assert!(exported.status.success(), "{}", text(&exported));
    let read = |name: &str| std::fs::read(folder.path().join("run").join(name).join("model.safetensors")).unwrap();
    assert!(read("head") == read("again"));
}

#[test]
fn wrong_recipes_and_files_are_errors_that_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 4);
    for (arguments, says) in [
        (vec!["--set", "train.learning_rate=1"], "unknown key"),
        (vec!["--set", "draft.vocab_size=4000"], "4000"),
        (vec!["--set", "data.train=[\"nowhere.jsonl\"]"], "nowhere.jsonl"),
        (vec!["--set", "target.path=nowhere"], "no target here"),
        (vec!["--set", "features.layers=[1,2,9]"], "must ascend and lie between"),
        (vec!["--set", "draft.norm_before_residual=true"], "sglang"),
    ] {
        let output = run(&recipe, &arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output));
        let said: String = text(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
    // A torn line is counted and left out, or refused.
    let train = folder.path().join("train.jsonl");
    let mut lines = std::fs::read_to_string(&train).unwrap();
    lines.push_str("{\"id\": \"torn\", \"prompt_ids\": [1,");
    std::fs::write(&train, lines).unwrap();
    let skipped = run(&recipe, &["--set", "train.max_steps=1"]);
    assert!(skipped.status.success() && text(&skipped).contains("train.jsonl:5"), "{}", text(&skipped));
    let refused = run(&recipe, &["--set", "data.on_bad=refuse", "--set", "train.out=other"]);
    assert!(!refused.status.success() && text(&refused).contains("jsonl:5"), "{}", text(&refused));
}

#[test]
fn capture_answers_each_prompt_once() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = tiny::write_project(folder.path(), 4);
    let prompt = |i: usize| {
        format!(
            "{{\"id\":\"p{i}\",\"dataset\":\"d\",\"messages\":[{{\"role\":\"user\",\"content\":\"w{} w7\"}}]}}\n",
            i + 3
        )
    };
    std::fs::write(folder.path().join("prompts.jsonl"), (0..12).map(prompt).collect::<String>()).unwrap();
    let capture = || {
        let arguments = [
            "capture",
            "--recipe",
            recipe.to_str().unwrap(),
            "--set",
            "capture.prompts=[\"prompts.jsonl\"]",
            "--set",
            "capture.max_tokens=9",
            "--set",
            "capture.held_out_share=0.3",
            "--set",
            "capture.batch=5",
        ];
        let output = tiny::eaglet(&arguments).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    assert!(capture().contains("12 answers captured"));
    let journal = folder.path().join("capture/journal.jsonl");
    let train = std::fs::read(folder.path().join("capture/train.jsonl")).unwrap();
    let bytes = std::fs::read(&journal).unwrap();
    let first: serde_json::Value = serde_json::from_slice(bytes.split(|&b| b == b'\n').next().unwrap()).unwrap();
    assert_eq!(first["prompt_ids"][0], 0);
    assert!(capture().contains("0 answers captured"));
    // A kill in the middle of a line loses that answer alone, and it comes back the same.
    std::fs::write(&journal, &bytes[..bytes.len() - 10]).unwrap();
    assert!(capture().contains("1 answers captured"));
    assert_eq!(std::fs::read(&journal).unwrap(), bytes);
    assert_eq!(std::fs::read(folder.path().join("capture/train.jsonl")).unwrap(), train);
}
