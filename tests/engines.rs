//! Against real serving engines, which no CI has. `tests/engines.sh` installs them, starts them and runs these.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run tests/engines.sh"))
}

/// One HTTP exchange with a server on this machine.
fn http(port: u16, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(300)))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_string());
    Ok((status, body))
}

/// A server that dies with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The script execs the server, whose workers are in its process group.
        let _ = Command::new("pkill").args(["-P", &self.0.id().to_string()]).status();
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn counter(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
    line.and_then(|line| line.rsplit(' ').next()).and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

#[test]
#[ignore = "needs vLLM: tests/engines.sh"]
fn vllm_accepts_as_many_tokens_as_our_own_decoder() {
    let root = env!("CARGO_MANIFEST_DIR");
    let (recipe, head) = (variable("EAGLET_RECIPE"), variable("EAGLET_HEAD"));
    let evaluated = Command::new(env!("CARGO_BIN_EXE_eaglet"))
        .args(["evaluate", "--recipe", &recipe, "--head", &head, "--no-compare", "--json"])
        .output()
        .unwrap();
    assert!(evaluated.status.success(), "{}", String::from_utf8_lossy(&evaluated.stderr));
    let ours: Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    let ours = ours["decoded"][0]["acceptance_length"].as_f64().unwrap();

    let port = 8397;
    let log = std::fs::File::create(std::env::temp_dir().join("eaglet-vllm.log")).unwrap();
    let server = Command::new("bash")
        .arg(format!("{}/vllm_cpu/serve.sh", variable("EAGLET_ENGINES")))
        .args([&variable("EAGLET_VLLM"), &variable("EAGLET_TARGET"), &port.to_string(), "--draft", &head, "3"])
        .stdout(Stdio::from(log.try_clone().unwrap()))
        .stderr(Stdio::from(log))
        .spawn()
        .unwrap();
    let mut server = Server(server);
    let begun = Instant::now();
    while !http(port, "GET", "/health", "").is_ok_and(|(status, _)| status == 200) {
        assert!(
            server.0.try_wait().unwrap().is_none(),
            "the server ended; see eaglet-vllm.log in the temporary folder"
        );
        assert!(begun.elapsed() < Duration::from_secs(600), "the server does not get ready");
        std::thread::sleep(Duration::from_secs(2));
    }
    let (_, models) = http(port, "GET", "/v1/models", "").unwrap();
    let models: Value = serde_json::from_str(&models).unwrap();
    let model = models["data"][0]["id"].as_str().unwrap().to_string();
    let held_out = std::fs::read_to_string(format!("{root}/data/quickstart/held_out.jsonl")).unwrap();
    let sequences: Vec<Value> = held_out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (_, before) = http(port, "GET", "/metrics", "").unwrap();
    std::thread::scope(|scope| {
        for part in sequences.chunks(sequences.len().div_ceil(8)) {
            let model = &model;
            scope.spawn(move || {
                for sequence in part {
                    let body =
                        json!({"model": model, "prompt": sequence["prompt_ids"], "max_tokens": 128, "temperature": 0});
                    let (status, answer) = http(port, "POST", "/v1/completions", &body.to_string()).unwrap();
                    assert_eq!(status, 200, "{answer}");
                }
            });
        }
    });
    let (_, after) = http(port, "GET", "/metrics", "").unwrap();
    let grown = |name: &str| counter(&after, name) - counter(&before, name);
    let drafts = grown("vllm:spec_decode_num_drafts_total");
    let theirs = 1.0 + grown("vllm:spec_decode_num_accepted_tokens_total") / drafts;
    println!("acceptance length: ours {ours:.3}, vLLM {theirs:.3} over {drafts} verifications");
    assert!(drafts > 0.0, "vLLM counted no drafts");
    assert!((ours - theirs).abs() < 0.1, "ours {ours:.3}, vLLM {theirs:.3}");
}

/// A capture of all shipped prompts from a live server, killed ten times: nothing accepted is lost, nothing twice.
fn ten_kills(engine: &str, url: &str) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("capture");
    let recipe = folder.path().join("recipe.toml");
    let text = format!(
        "[target]\nfamily = \"smollm2-135m\"\npath = {:?}\n[capture]\nengine = \"{engine}\"\nservers = [\"{url}\"]\n\
         prompts = [{:?}]\nout = {out:?}\nmax_tokens = 32\nconcurrency = 8\n",
        variable("EAGLET_TARGET"),
        root.join("data/b*.jsonl"),
    );
    std::fs::write(&recipe, text).unwrap();
    let log = folder.path().join("log");
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_eaglet"))
            .args(["capture", "--recipe", recipe.to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap()
    };
    let journal = out.join("journal.jsonl");
    let bytes = || std::fs::read(&journal).unwrap_or_default();
    let whole = |bytes: &[u8]| bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
    let rows = |bytes: &[u8]| bytes.iter().filter(|&&b| b == b'\n').count();
    let mut before = Vec::new();
    for kill in 1..=10u64 {
        let mut run = start();
        let wanted = rows(&before) + 30;
        while rows(&bytes()) < wanted {
            if let Some(status) = run.try_wait().unwrap() {
                panic!("run {kill} ended early, {status}: {}", std::fs::read_to_string(&log).unwrap());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(kill * 37));
        run.kill().unwrap();
        run.wait().unwrap();
        let after = bytes();
        assert!(after.starts_with(&before), "kill {kill} changed what was there");
        println!("{engine}: kill {kill} at {} answers, {} torn bytes", rows(&after), after.len() - whole(&after));
        before = after[..whole(&after)].to_vec();
    }
    let status = start().wait().unwrap();
    assert!(status.success(), "{}", std::fs::read_to_string(&log).unwrap());
    let after = bytes();
    assert!(after.starts_with(&before) && whole(&after) == after.len());
    let answers: Vec<Value> =
        after.split(|&b| b == b'\n').filter(|l| !l.is_empty()).map(|l| serde_json::from_slice(l).unwrap()).collect();
    let ids: std::collections::BTreeSet<&str> = answers.iter().map(|a| a["id"].as_str().unwrap()).collect();
    let run: Value = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
    let wanted: u64 = run["groups"].as_array().unwrap().iter().map(|g| g["wanted"].as_u64().unwrap()).sum();
    println!("{engine}: {} answers of {} prompts asked for, {} distinct", answers.len(), wanted, ids.len());
    assert!(answers.len() >= 300 && answers.len() as u64 == wanted && ids.len() == answers.len());
}

#[test]
#[ignore = "needs vLLM: tests/engines.sh"]
fn vllm_capture_survives_ten_kills() {
    ten_kills("vllm", &variable("EAGLET_VLLM_URL"));
}

#[test]
#[ignore = "needs SGLang: tests/engines.sh"]
fn sglang_capture_survives_ten_kills() {
    ten_kills("sglang", &variable("EAGLET_SGLANG_URL"));
}
