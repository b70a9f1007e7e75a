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
