//! Captures from live servers. Read [`Run::go`] first: send while there is room, hear what comes, look around each second.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::concurrency::{Auto, Seen, resident};
use super::engine::{Answer, Echo, Load, Refusal, engine};
use super::http::{Failure, Identity, Server};
use super::jobs::{self, Bounds, Classes, Jobs};
use super::journal::{Failed, Journal, Lines, prompt_of};
use super::order::Order;
use super::prompts::{Content, Prompt, Prompts};
use super::reasoning::{Guard, Marks, cut};
use super::render::Renderer;
use super::status::{
    Finished, Flights, GroupStatus, Hours, InFlight, Observed, Pace, ServerStatus, Status, bin, write_json,
};
use super::{CaptureError, Job, Sampling, Sequence, Took};
use crate::recipe::{CaptureRecipe, Concurrency, Regenerate, SegmentKind};
use crate::signals::Signals;
use crate::target::Message;

/// Failures in a row, of one server, after which it is left alone and probed.
const FAILURES_IN_A_ROW: usize = 8;
/// Refusals in a row after which the run stops: the list would only burn through.
const REFUSALS_IN_A_ROW: usize = 16;
/// Longest pause between tries and between probes.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A request without a token for this long is taken to be queued.
const SILENT: Duration = Duration::from_secs(3);
/// Seconds between lines of status.jsonl, and between its lines in a log.
const STATUS_EVERY: Duration = Duration::from_secs(5);

/// What stands in run.json: a later run must go on with the same, and a plan reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFile {
    pub identity: Identity,
    pub engine: String,
    /// `tokenizer` or `server`.
    pub rendered_by: String,
    pub thinking: String,
    /// Facts of each server.
    pub servers: Vec<super::engine::ServerFacts>,
    /// Requests in flight: the recipe's number, `None` for auto.
    pub concurrency: Option<usize>,
    /// Answers wanted of each class and dataset, and under which cap.
    pub groups: Vec<GroupStatus>,
    pub duplicates: usize,
    pub skipped: usize,
    pub left_off: usize,
}

/// What a run needs beside the recipe.
pub struct Setup<'a> {
    pub recipe: &'a CaptureRecipe,
    pub servers: Vec<Server>,
    pub renderer: Renderer,
    pub prompts: Prompts,
    pub marks: Marks,
    /// 0 is unknown.
    pub vocab_size: usize,
    /// Ask for only so many answers, spread over the datasets.
    pub pilot: Option<usize>,
    /// Ask again what servers refused for good in an earlier run.
    pub retry_failed: bool,
    /// How long answers in flight may still come after a signal.
    pub grace: Duration,
}

/// What a run did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Answers that were there from before.
    pub found: usize,
    pub status: Status,
    pub seconds: f64,
    /// Prompts that were not asked; skipped.jsonl lists them.
    pub skipped: usize,
    pub duplicates: usize,
    pub left_off: usize,
    /// A signal ended the run; the same command goes on.
    pub interrupted: Option<i32>,
}

/// Reaches every server of a recipe and makes sure that they serve one model.
///
/// # Errors
/// When one does not answer or serves another.
pub async fn connect(recipe: &CaptureRecipe, key: Option<&str>) -> Result<(Vec<Server>, Identity), CaptureError> {
    let engine: Arc<dyn super::engine::Engine> =
        engine(recipe.engine).ok_or_else(|| CaptureError::Nothing("the embedded engine has no server".into()))?.into();
    let mut servers: Vec<Server> = Vec::new();
    let mut identity: Option<Identity> = None;
    for url in &recipe.servers {
        let server = Server::connect(url, Arc::clone(&engine), key).await?;
        let own =
            server.identity().await.map_err(|e| CaptureError::Server { url: url.clone(), reason: e.to_string() })?;
        match &identity {
            Some(first) => same_model(url, first, &own)?,
            None => identity = Some(own),
        }
        servers.push(server);
    }
    let identity = identity.ok_or_else(|| CaptureError::Nothing("capture.servers is empty".into()))?;
    Ok((servers, identity))
}

/// Whether a server still serves the model a capture began with.
///
/// # Errors
/// Says what differs.
pub fn same_model(url: &str, first: &Identity, now: &Identity) -> Result<(), CaptureError> {
    let reason = if first.probe != now.probe {
        "its tokenizer cuts a probe text otherwise".to_string()
    } else if first.model != now.model {
        format!("`{}`, before it was `{}`", now.model, first.model)
    } else if first.vocab_size != now.vocab_size {
        format!("a vocabulary of {:?}, before it was {:?}", now.vocab_size, first.vocab_size)
    } else if now.context < first.context {
        format!("a context of {} tokens, before it was {}", now.context, first.context)
    } else {
        return Ok(());
    };
    Err(CaptureError::OtherModel { url: url.into(), reason })
}

/// Asks every prompt that is not answered yet and appends the answers to the journal. `forecast` tells the time left,
/// `show` is handed the status about each second.
///
/// # Errors
/// When the run must not go on: another model, no reasoning where it is required, refusals in a row, all servers silent
/// for long, or a file that cannot be written. What was captured stays, and the same call goes on.
pub async fn capture(
    setup: Setup<'_>,
    identity: &Identity,
    signals: &Signals,
    forecast: &mut dyn FnMut(&Observed) -> Option<Hours>,
    show: &mut dyn FnMut(&Status),
) -> Result<Outcome, CaptureError> {
    let folder = setup.recipe.out.clone();
    std::fs::create_dir_all(&folder).map_err(CaptureError::io(&folder))?;
    let run_path = folder.join("run.json");
    if let Ok(text) = std::fs::read_to_string(&run_path)
        && let Ok(before) = serde_json::from_str::<RunFile>(&text)
    {
        same_model(&setup.servers[0].url, &before.identity, identity)?;
    }
    let classes = Classes::new(setup.recipe);
    let mut observed = Observed { streaming: setup.recipe.stream, ..Observed::default() };
    let mut texts: HashMap<String, Vec<u32>> = HashMap::new();
    let marks = setup.marks;
    let (journal, mut before) = Journal::open(&folder, |sequence| {
        observe(&mut observed, sequence, &marks, &classes);
        if sequence.id != prompt_of(&sequence.id).0 && setup.recipe.regenerate == Regenerate::All {
            texts.insert(sequence.id.clone(), sequence.output_ids.clone());
        }
    })?;
    if setup.retry_failed {
        before.failed.clear();
    }
    let found = before.answered.len();
    let mut done: HashSet<String> = before.answered;
    done.extend(before.failed);

    let room = setup.servers.iter().map(|s| s.engine.room(s.facts.context)).min().unwrap_or(0);
    let (asked, chains) = open_chains(&setup, &marks, &texts).await;
    let ids = setup.renderer.all(&asked, setup.recipe.thinking, &folder).await?;
    let bounds = Bounds { room, vocab_size: setup.vocab_size };
    let Jobs { jobs, mut wanted, skipped, duplicates, left_off } =
        jobs::plan(&asked, &ids, &classes, setup.recipe, bounds, &done);
    drop((ids, asked));
    for job in &jobs {
        if let Some(chain) = chains.get(&job.prompt) {
            // The turns before it are answered, those behind it will be asked.
            *wanted.entry((job.class, job.dataset.clone())).or_default() += chain.ends.len() - 1;
        }
    }
    list_skipped(&folder, &skipped, &setup.prompts)?;
    for ((class, dataset), count) in &wanted {
        let class = &classes.0[*class];
        let group = observed.group(&class.name, dataset, class.max_tokens);
        observed.groups[group].wanted = *count;
        observed.groups[group].max_tokens = class.max_tokens;
    }
    let concurrency = match setup.recipe.concurrency {
        Concurrency::Fixed(n) => Some(n),
        Concurrency::Auto(_) => None,
    };
    let plain = |g: &GroupStatus| GroupStatus { done: 0, tokens: 0, in_flight: 0, ..g.clone() };
    let file = RunFile {
        identity: identity.clone(),
        engine: setup.servers[0].engine.name().into(),
        rendered_by: setup.renderer.name().into(),
        thinking: format!("{:?}", setup.recipe.thinking).to_lowercase(),
        servers: setup.servers.iter().map(|s| s.facts.clone()).collect(),
        concurrency: concurrency.or_else(|| classes.0.iter().filter_map(|c| c.concurrency).reduce(|a, b| a + b)),
        groups: observed.groups.iter().map(plain).collect(),
        duplicates,
        skipped: skipped.len(),
        left_off,
    };
    write_json(&run_path, &file)?;

    let mut order = Order::new(jobs);
    for finished in &observed.finished {
        let group = &observed.groups[finished.group];
        let class = classes.of(&group.dataset, finished.prompt_tokens);
        order.learn(class, &group.dataset, finished.tokens);
    }
    if let Some(most) = setup.pilot {
        order.keep(most.saturating_sub(found));
        if found >= most {
            order = Order::default();
        }
    }

    let (sender, events) = mpsc::unbounded_channel();
    let share = setup.servers.len();
    // Before anything is known: half of the largest cap is there at a random moment, as of lengths spread evenly.
    let guess = match observed.finished.is_empty() {
        true => classes.0.iter().map(|c| c.max_tokens).max().unwrap_or(512) as f64 / 3.0,
        false => 0.0,
    };
    let prompt_mean = mean_prompt(&order, &observed);
    let held = resident(prompt_mean, observed.finished.iter().map(|f| f.tokens as f64), guess);
    let slots = setup.servers.iter().map(|server| Slot {
        server: server.clone(),
        limit: concurrency
            .map_or_else(|| Limit::Auto(Auto::new(&server.facts, held)), |n| Limit::Fixed(n.div_ceil(share))),
        in_flight: 0,
        up: true,
        failures: 0,
        load: None,
        polling: false,
        probe_at: Instant::now(),
        pause: Duration::from_secs(1),
        tokens: 0.0,
    });
    let slots = slots.collect();
    let guard = Guard::new(setup.recipe.reasoning, setup.recipe.thinking, marks.reasoning.is_some());
    let status_file = Lines::open(&folder.join("status.jsonl"), |_: serde::de::IgnoredAny| {})?;
    let mut run = Run {
        recipe: setup.recipe,
        identity,
        classes: &classes,
        renderer: &setup.renderer,
        room,
        vocab_size: setup.vocab_size,
        marks,
        order,
        slots,
        journal,
        status_file,
        guard,
        observed,
        chains,
        flights: HashMap::new(),
        retries: Vec::new(),
        refused: Vec::new(),
        writing: 0,
        in_class: vec![0; classes.0.len()],
        next: 0,
        sender,
        begun: Instant::now(),
        status: Status { run: now(), ..Status::default() },
        recent: std::collections::VecDeque::new(),
        prompt_mean,
    };
    let ended = run.go(events, signals, setup.grace, forecast, show).await;
    run.abort_all().await;
    let finish = run.finish(&folder);
    let interrupted = ended?;
    finish?;
    let seconds = run.begun.elapsed().as_secs_f64();
    Ok(Outcome { found, status: run.status, seconds, skipped: skipped.len(), duplicates, left_off, interrupted })
}

/// A conversation whose every assistant turn the target writes anew.
struct Chain {
    prompt: Prompt,
    /// Where each turn's prompt ends among the messages.
    ends: Vec<usize>,
    /// The target's own turns so far.
    answers: Vec<Message>,
}

impl Chain {
    /// The prompt of the next turn, with the target's own answers in place of the data's.
    fn next(&self) -> Option<Prompt> {
        let turn = self.answers.len();
        let Content::Messages { messages, tools } = &self.prompt.content else { return None };
        let end = *self.ends.get(turn)?;
        let mut own = self.answers.iter();
        let mut history: Vec<Message> = Vec::new();
        for (i, message) in messages[..end].iter().enumerate() {
            if self.ends.contains(&i) {
                history.extend(own.next().cloned());
            }
            // The data's assistant turns are what is replaced; several in a row count as one.
            if message.role != "assistant" {
                history.push(message.clone());
            }
        }
        let id = if self.ends.len() == 1 { self.prompt.id.clone() } else { format!("{}@{}", self.prompt.id, turn + 1) };
        let content = Content::Messages { messages: history, tools: tools.clone() };
        Some(Prompt { id, dataset: self.prompt.dataset.clone(), content })
    }
}

/// The prompts to ask first. Under `regenerate = "all"` a conversation of several turns becomes a chain, gone through as
/// far as its answers are there; the map is by the id of the turn that is asked next.
async fn open_chains(
    setup: &Setup<'_>,
    marks: &Marks,
    answered: &HashMap<String, Vec<u32>>,
) -> (Vec<Prompt>, HashMap<String, Chain>) {
    if setup.recipe.regenerate == Regenerate::Last {
        return (setup.prompts.prompts.clone(), HashMap::new());
    }
    let (mut asked, mut chains) = (Vec::new(), HashMap::new());
    for prompt in &setup.prompts.prompts {
        let Content::Messages { messages, .. } = &prompt.content else {
            asked.push(prompt.clone());
            continue;
        };
        let turn_ends = |i: &usize| messages[*i].role == "assistant" && messages[i - 1].role != "assistant";
        let ends: Vec<usize> = (1..messages.len()).filter(turn_ends).chain([messages.len()]).collect();
        let mut chain = Chain { prompt: prompt.clone(), ends, answers: Vec::new() };
        while let Some(next) = chain.next() {
            let Some(output) = answered.get(&next.id).filter(|_| chain.answers.len() + 1 < chain.ends.len()) else {
                break;
            };
            match turn_of(&setup.renderer, output, marks).await {
                Ok(message) => chain.answers.push(message),
                Err(reason) => {
                    tracing::warn!("{}: cannot be gone on with: {reason}", next.id);
                    break;
                }
            }
        }
        if let Some(next) = chain.next() {
            if chain.ends.len() > 1 {
                chains.insert(next.id.clone(), chain);
            }
            asked.push(next);
        }
    }
    (asked, chains)
}

/// An answer as a turn of history: what it said as content, what it thought where templates look for it.
async fn turn_of(renderer: &Renderer, output: &[u32], marks: &Marks) -> Result<Message, String> {
    let cut = cut(&[], output, false, marks);
    // Where the prompt opened the thinking, only the closing token tells.
    let close = marks.reasoning.and_then(|(_, end)| output.iter().position(|&id| id == end)).map(|at| at + 1);
    let mut reasoning: Vec<u32> = Vec::new();
    let mut said: Vec<u32> = Vec::new();
    for segment in &cut.segments {
        let ids = &output[segment.start..segment.end];
        if segment.kind == SegmentKind::Reasoning { reasoning.extend(ids) } else { said.extend(ids) }
    }
    if let (true, Some(close)) = (reasoning.is_empty(), close) {
        reasoning = output[..close].to_vec();
        said = output[close..].to_vec();
    }
    let mut message = Message::new("assistant", renderer.text(&said).await?.trim().to_string());
    if !reasoning.is_empty() {
        let marks: Vec<u32> = marks.reasoning.map_or(vec![], |(open, close)| vec![open, close]);
        reasoning.retain(|id| !marks.contains(id));
        message.more.insert("reasoning_content".into(), renderer.text(&reasoning).await?.trim().into());
    }
    Ok(message)
}

/// Writes skipped.jsonl anew: rows that are no prompts and prompts that cannot be asked.
fn list_skipped(folder: &Path, skipped: &[jobs::Skipped], prompts: &Prompts) -> Result<(), CaptureError> {
    let path = folder.join("skipped.jsonl");
    if skipped.is_empty() && prompts.bad.is_empty() && !path.exists() {
        return Ok(());
    }
    let mut text = String::new();
    let line = |value: serde_json::Value| value.to_string() + "\n";
    prompts.bad.iter().for_each(|reason| text += &line(serde_json::json!({ "reason": reason })));
    skipped.iter().for_each(|s| text += &line(serde_json::json!(s)));
    std::fs::write(&path, text).map_err(CaptureError::io(&path))
}

/// Takes an answer of the journal into what is known. It belongs to the class that the recipe gives its prompt now, which
/// may be another than when it was asked.
pub fn observe(observed: &mut Observed, sequence: &Sequence, marks: &Marks, classes: &Classes) {
    let took = sequence.took.as_ref();
    let class = &classes.0[classes.of(&sequence.dataset, sequence.prompt_ids.len())];
    let group = observed.group(&class.name, &sequence.dataset, class.max_tokens);
    let capped = sequence.finish_reason == "length";
    let reasoned = match sequence.segments.is_empty() {
        true => cut(&sequence.prompt_ids, &sequence.output_ids, capped, marks).reasoned,
        false => sequence.segments.iter().any(|s| s.kind == SegmentKind::Reasoning),
    };
    observed.finish(Finished {
        group,
        prompt_tokens: sequence.prompt_ids.len(),
        tokens: sequence.output_ids.len(),
        capped,
        reasoned,
        asked: took.map_or(0.0, |t| t.asked),
        seconds: took.map_or(0.0, |t| t.seconds),
        in_flight: took.map_or(0, |t| t.in_flight),
    });
}

fn mean_prompt(order: &Order, observed: &Observed) -> f64 {
    let (mut tokens, mut count) = order.prompt_tokens();
    tokens += observed.finished.iter().map(|f| f.prompt_tokens).sum::<usize>();
    count += observed.finished.len();
    tokens as f64 / count.max(1) as f64
}

enum Limit {
    Fixed(usize),
    Auto(Auto),
}

impl Limit {
    fn now(&self) -> usize {
        match self {
            Self::Fixed(n) => *n,
            Self::Auto(auto) => auto.limit(),
        }
    }
}

/// A server and our side of it.
struct Slot {
    server: Server,
    limit: Limit,
    in_flight: usize,
    up: bool,
    /// Failures since the last answer.
    failures: usize,
    load: Option<Load>,
    polling: bool,
    probe_at: Instant,
    pause: Duration,
    /// Tokens received from it.
    tokens: f64,
}

/// A request on its way.
struct Flight {
    job: Job,
    server: usize,
    group: usize,
    tries: usize,
    sent: Instant,
    asked: f64,
    tokens: usize,
    task: JoinHandle<()>,
}

/// What comes in.
enum Event {
    Tokens { flight: u64, tokens: usize },
    End { flight: u64, result: Result<Answer, Failure> },
    Load { server: usize, load: Option<Load> },
    Probe { server: usize, result: Result<Identity, Failure> },
}

struct Run<'a> {
    recipe: &'a CaptureRecipe,
    identity: &'a Identity,
    classes: &'a Classes,
    renderer: &'a Renderer,
    room: usize,
    vocab_size: usize,
    marks: Marks,
    order: Order,
    slots: Vec<Slot>,
    journal: Journal,
    status_file: Lines,
    guard: Guard,
    observed: Observed,
    chains: HashMap<String, Chain>,
    flights: HashMap<u64, Flight>,
    /// Failed requests that wait for their next try.
    retries: Vec<(Instant, Job, usize)>,
    /// Final refusals since the last answer, not yet written: if they do not end, the fault is not theirs.
    refused: Vec<Failed>,
    /// Turns being rendered.
    writing: usize,
    in_class: Vec<usize>,
    next: u64,
    sender: mpsc::UnboundedSender<Event>,
    begun: Instant,
    status: Status,
    /// (time, tokens) of the last minute.
    recent: std::collections::VecDeque<(Instant, f64)>,
    prompt_mean: f64,
}

impl Run<'_> {
    async fn go(
        &mut self,
        mut events: mpsc::UnboundedReceiver<Event>,
        signals: &Signals,
        grace: Duration,
        forecast: &mut dyn FnMut(&Observed) -> Option<Hours>,
        show: &mut dyn FnMut(&Status),
    ) -> Result<Option<i32>, CaptureError> {
        let mut second = tokio::time::interval(Duration::from_secs(1));
        let mut short = tokio::time::interval(Duration::from_millis(100));
        let (mut written, mut foretold) = (Instant::now() - STATUS_EVERY, Instant::now());
        let mut until: Option<Instant> = None;
        let mut silent_since: Option<Instant> = None;
        loop {
            let stopping = signals.received().is_some();
            if !stopping {
                while let Some((job, tries, server)) = self.next_job() {
                    self.send(job, tries, server);
                }
            }
            let idle = self.flights.is_empty() && self.writing == 0;
            if idle && (stopping || (self.order.is_empty() && self.retries.is_empty())) {
                return Ok(signals.received());
            }
            tokio::select! {
                Some(event) = events.recv() => {
                    self.hear(event).await?;
                    // What has come meanwhile is heard before anything is sent.
                    while let Ok(event) = events.try_recv() {
                        self.hear(event).await?;
                    }
                }
                _ = second.tick() => {
                    self.look_around();
                    silent_since = match self.slots.iter().any(|slot| slot.up) {
                        true => None,
                        false => silent_since.or_else(|| Some(Instant::now())),
                    };
                    if silent_since.is_some_and(|since| since.elapsed().as_secs_f64() > self.recipe.idle_timeout_s) {
                        let url = self.slots[0].server.url.clone();
                        let reason = "no server answers any more; what was captured is kept".into();
                        return Err(CaptureError::Server { url, reason });
                    }
                    if foretold.elapsed() > Duration::from_secs(10) || self.begun.elapsed() < Duration::from_secs(2) {
                        foretold = Instant::now();
                        self.status.left = forecast(&self.observed);
                    }
                    self.renew_status();
                    if written.elapsed() >= STATUS_EVERY {
                        written = Instant::now();
                        self.status_file.append(&self.status)?;
                        Flights { at: now(), streaming: self.recipe.stream, flights: self.observed.flights.clone() }
                            .write(&self.recipe.out)?;
                    }
                    show(&self.status);
                }
                _ = short.tick() => {
                    if stopping && until.is_none() {
                        until = Some(Instant::now() + grace);
                        tracing::info!(
                            "no more is sent; {} answers in flight have {:.0} s to come (a second signal ends at once)",
                            self.flights.len(),
                            grace.as_secs_f64()
                        );
                    }
                    if until.is_some_and(|until| Instant::now() >= until) {
                        tracing::info!("{} answers in flight are aborted", self.flights.len());
                        return Ok(signals.received());
                    }
                }
            }
        }
    }

    /// What to send next and where; `None` while there is no room or nothing due.
    fn next_job(&mut self) -> Option<(Job, usize, usize)> {
        let room = |slot: &Slot| (slot.limit.now() as f64 - slot.in_flight as f64) / slot.limit.now().max(1) as f64;
        let (server, _) = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.up && slot.in_flight < slot.limit.now())
            .max_by(|a, b| room(a.1).total_cmp(&room(b.1)))?;
        let classes = self.classes;
        let in_class = &self.in_class;
        let may = |class: usize| classes.0[class].concurrency.is_none_or(|most| in_class[class] < most);
        let now = Instant::now();
        if let Some(at) = self.retries.iter().position(|(due, job, _)| *due <= now && may(job.class)) {
            let (_, job, tries) = self.retries.swap_remove(at);
            return Some((job, tries, server));
        }
        let slots = self.slots.iter().map(|slot| slot.limit.now()).sum();
        self.order.next(slots, may).map(|job| (job, 0, server))
    }

    fn send(&mut self, mut job: Job, tries: usize, server: usize) {
        let flight = self.next;
        self.next += 1;
        job.rid = format!("{}~{:.0}.{flight}", job.id, self.status.run);
        let class = &self.classes.0[job.class];
        let group = self.observed.group(&class.name, &job.dataset, class.max_tokens);
        let (draw, stream) = (class.draw.clone(), self.recipe.stream);
        let idle = Duration::from_secs_f64(self.recipe.idle_timeout_s);
        let (to, sender, asked) = (self.slots[server].server.clone(), self.sender.clone(), job.clone());
        let task = tokio::spawn(async move {
            let heard = sender.clone();
            let progress = move |tokens| {
                let _ = heard.send(Event::Tokens { flight, tokens });
            };
            let result = to.ask(&asked, &draw, stream, idle, progress).await;
            let _ = sender.send(Event::End { flight, result });
        });
        self.slots[server].in_flight += 1;
        self.in_class[job.class] += 1;
        let sent = Instant::now();
        self.flights.insert(flight, Flight { job, server, group, tries, sent, asked: now(), tokens: 0, task });
    }

    async fn hear(&mut self, event: Event) -> Result<(), CaptureError> {
        match event {
            Event::Tokens { flight, tokens } => {
                if let Some(flight) = self.flights.get_mut(&flight) {
                    let more = tokens.saturating_sub(flight.tokens) as f64;
                    flight.tokens = flight.tokens.max(tokens);
                    self.slots[flight.server].tokens += more;
                    self.status.tokens += more;
                }
            }
            Event::Load { server, load } => {
                self.slots[server].polling = false;
                self.slots[server].load = load;
            }
            Event::Probe { server, result } => {
                let slot = &mut self.slots[server];
                slot.polling = false;
                match result {
                    Ok(identity) => {
                        same_model(&slot.server.url, self.identity, &identity)?;
                        tracing::info!("{} answers again", slot.server.url);
                        slot.up = true;
                        slot.failures = 0;
                        slot.pause = Duration::from_secs(1);
                    }
                    Err(failure) => {
                        tracing::debug!("{}: {failure}", slot.server.url);
                        slot.pause = (slot.pause * 2).min(LONGEST_PAUSE);
                        slot.probe_at = Instant::now() + slot.pause;
                    }
                }
            }
            Event::End { flight, result } => {
                let Some(flight) = self.flights.remove(&flight) else { return Ok(()) };
                self.slots[flight.server].in_flight -= 1;
                self.in_class[flight.job.class] -= 1;
                let checked = result.and_then(|answer| check(answer, &flight.job, self.vocab_size));
                match checked {
                    Ok(answer) => self.take(flight, answer).await?,
                    Err(failure) => self.failed(flight, failure)?,
                }
            }
        }
        Ok(())
    }

    /// Keeps a good answer.
    async fn take(&mut self, flight: Flight, answer: Answer) -> Result<(), CaptureError> {
        let Flight { job, server, group, sent, asked, tokens, .. } = flight;
        let url = &self.slots[server].server.url;
        let echoed = match &answer.prompt {
            Echo::Untold => true,
            Echo::Count(count) => *count == job.prompt_ids.len(),
            Echo::Ids(ids) => *ids == *job.prompt_ids,
        };
        if !echoed {
            let reason = format!("it saw another prompt than {} has: a proxy or plugin rewrites prompts", job.id);
            return Err(CaptureError::Server { url: url.clone(), reason });
        }
        let class = &self.classes.0[job.class];
        let capped = answer.finish_reason == "length";
        let cut = cut(&job.prompt_ids, &answer.output_ids, capped, &self.marks);
        let length = answer.output_ids.len();
        let sequence = Sequence {
            id: job.id.clone(),
            dataset: job.dataset.clone(),
            prompt_ids: job.prompt_ids.to_vec(),
            output_ids: answer.output_ids,
            finish_reason: answer.finish_reason,
            sampling: Some(Sampling { temperature: class.draw.temperature, top_p: class.draw.top_p, seed: job.seed }),
            segments: cut.segments.clone(),
            took: Some(Took {
                class: class.name.clone(),
                max_tokens: job.max_tokens,
                asked,
                seconds: sent.elapsed().as_secs_f64(),
                in_flight: self.flights.len() + 1,
                server,
            }),
        };
        self.journal.answer(&sequence)?;
        let slot = &mut self.slots[server];
        slot.failures = 0;
        let more = length.saturating_sub(tokens) as f64;
        slot.tokens += more;
        self.status.tokens += more;
        self.status.prompt_tokens += job.prompt_ids.len() as f64;
        self.status.answers += 1;
        self.status.reasoned += usize::from(cut.reasoned);
        self.status.capped += usize::from(capped);
        let bin = bin(length);
        if self.status.histogram.len() <= bin {
            self.status.histogram.resize(bin + 1, 0);
        }
        self.status.histogram[bin] += 1;
        self.order.learn(job.class, &job.dataset, length);
        self.observed.finish(Finished {
            group,
            prompt_tokens: job.prompt_ids.len(),
            tokens: length,
            capped,
            reasoned: cut.reasoned,
            asked,
            seconds: sent.elapsed().as_secs_f64(),
            in_flight: self.flights.len() + 1,
        });
        // An answer proves that the refusals before it were the prompts' own fault.
        for failed in std::mem::take(&mut self.refused) {
            self.journal.failure(&failed)?;
        }
        self.guard.see(&cut, &job.id)?;
        if let Some(chain) = self.chains.remove(&job.prompt) {
            self.next_turn(chain, &job, &sequence.output_ids).await?;
        }
        Ok(())
    }

    /// Sets the next turn of a conversation in line, behind the answer that just came.
    async fn next_turn(&mut self, mut chain: Chain, job: &Job, output: &[u32]) -> Result<(), CaptureError> {
        let next = match turn_of(self.renderer, output, &self.marks).await {
            Ok(message) => {
                chain.answers.push(message);
                chain.next()
            }
            Err(reason) => {
                tracing::warn!("{}: cannot be gone on with: {reason}", job.id);
                None
            }
        };
        let Some(next) = next else { return Ok(()) };
        let Content::Messages { messages, tools } = &next.content else { return Ok(()) };
        let ids = self.renderer.one(messages, tools.as_ref(), self.recipe.thinking).await;
        let fits = |ids: &Vec<u32>| {
            ids.len() < self.room && (self.vocab_size == 0 || ids.iter().all(|&id| (id as usize) < self.vocab_size))
        };
        match ids {
            Ok(ids) if fits(&ids) => {
                let class = &self.classes.0[job.class];
                self.order.push(Job {
                    rid: String::new(),
                    prompt: next.id.clone(),
                    dataset: next.dataset.clone(),
                    class: job.class,
                    max_tokens: class.max_tokens.min(self.room - ids.len()),
                    prompt_ids: ids,
                    seed: jobs::seed(self.recipe.seed, &next.id),
                    id: next.id.clone(),
                });
                self.chains.insert(next.id, chain);
            }
            other => {
                let reason = other.err().unwrap_or_else(|| "it leaves no room in the context".into());
                let dataset = next.dataset;
                self.journal.failure(&Failed { id: next.id, dataset, reason, tries: 0, again: false })?;
                self.status.failed += 1;
            }
        }
        Ok(())
    }

    /// Decides what becomes of a request that gave nothing.
    fn failed(&mut self, flight: Flight, failure: Failure) -> Result<(), CaptureError> {
        let Flight { job, server, tries, tokens, .. } = flight;
        let tries = tries + 1;
        // What had come of it is lost, and was never whole work.
        self.status.tokens -= tokens as f64;
        self.slots[server].tokens -= tokens as f64;
        let reason = failure.to_string();
        let entry =
            |again| Failed { id: job.id.clone(), dataset: job.dataset.clone(), reason: reason.clone(), tries, again };
        if let Failure::Refused(Refusal::Key { .. }) = failure {
            return Err(CaptureError::Server { url: self.slots[server].server.url.clone(), reason });
        }
        if let Failure::Refused(Refusal::Never { .. }) = failure {
            tracing::warn!("{}: refused: {reason}", job.id);
            self.status.failed += 1;
            self.refused.push(entry(false));
            if self.refused.len() >= REFUSALS_IN_A_ROW {
                let count = self.refused.len();
                for failed in std::mem::take(&mut self.refused) {
                    self.journal.failure(&Failed { again: true, ..failed })?;
                }
                return Err(CaptureError::Refused { count, id: job.id, reason });
            }
            return Ok(());
        }
        let slot = &mut self.slots[server];
        slot.failures += 1;
        let gone = matches!(failure, Failure::Connection(_) | Failure::BrokenOff(_));
        if slot.up && (gone || slot.failures >= FAILURES_IN_A_ROW) {
            tracing::warn!("{}: {reason}; nothing is sent there until it answers a probe", slot.server.url);
            slot.up = false;
            slot.probe_at = Instant::now() + slot.pause;
        }
        if tries > self.recipe.retries {
            tracing::warn!("{}: given up after {tries} tries: {reason}", job.id);
            self.status.failed += 1;
            self.journal.failure(&entry(true))?;
            return Ok(());
        }
        self.status.retries += 1;
        let pause = Duration::from_millis(500).saturating_mul(1 << tries.min(10)).min(LONGEST_PAUSE);
        let pause = pause.mul_f64(rand::rng().random_range(0.5..1.5));
        self.retries.push((Instant::now() + pause, job, tries));
        Ok(())
    }

    /// Once a second: asks servers how busy they are, probes silent ones, moves the limits.
    fn look_around(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let flights = self.flights.values();
        let lengths = self.observed.finished.iter().map(|f| f.tokens as f64);
        // Those in flight will be longer than they are now, the shorter the journal the more they tell.
        let few = self.observed.finished.len() < 200;
        let held = resident(
            self.prompt_mean,
            lengths.chain(flights.filter(|_| few).map(|f| f.tokens as f64 * 2.0)),
            self.recipe.max_tokens as f64 / 3.0,
        );
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let silent = self.flights.values().filter(|f| f.server == at && f.tokens == 0 && f.sent.elapsed() > SILENT);
            if let (true, Limit::Auto(auto)) = (slot.up, &mut slot.limit) {
                auto.tick(&Seen {
                    now: seconds,
                    in_flight: slot.in_flight,
                    silent: self.recipe.stream.then(|| silent.count()),
                    load: slot.load,
                    tokens: slot.tokens,
                    resident: held,
                });
            }
            if slot.polling || (!slot.up && Instant::now() < slot.probe_at) {
                continue;
            }
            slot.polling = true;
            let (server, sender, up) = (slot.server.clone(), self.sender.clone(), slot.up);
            tokio::spawn(async move {
                let _ = sender.send(match up {
                    true => Event::Load { server: at, load: server.load().await },
                    false => Event::Probe { server: at, result: server.identity().await },
                });
            });
        }
    }

    fn renew_status(&mut self) {
        self.status.at = now();
        let flights: Vec<InFlight> = self
            .flights
            .values()
            .map(|flight| InFlight {
                class: self.classes.0[flight.job.class].name.clone(),
                dataset: flight.job.dataset.clone(),
                prompt_tokens: flight.job.prompt_ids.len(),
                tokens: flight.tokens,
                max_tokens: flight.job.max_tokens,
                seconds: flight.sent.elapsed().as_secs_f64(),
            })
            .collect();
        self.observed.flights = flights;
        self.observed.groups.iter_mut().for_each(|group| group.in_flight = 0);
        for flight in self.flights.values() {
            self.observed.groups[flight.group].in_flight += 1;
        }
        self.observed.pace.push(Pace {
            run: self.status.run,
            at: self.status.at,
            tokens: self.status.tokens,
            prompt_tokens: self.status.prompt_tokens,
            in_flight: self.flights.len(),
        });
        self.status.groups = self.observed.groups.clone();
        let lengths = self.observed.finished.iter().map(|f| f.tokens as f64);
        let held = resident(self.prompt_mean, lengths, self.recipe.max_tokens as f64 / 3.0);
        self.status.servers = self
            .slots
            .iter()
            .map(|slot| ServerStatus {
                url: slot.server.url.clone(),
                up: slot.up,
                limit: slot.limit.now(),
                in_flight: slot.in_flight,
                running: slot.load.map(|load| load.running),
                waiting: slot.load.map(|load| load.waiting),
                kv_use: slot.load.and_then(|load| load.kv_use),
                room: slot.server.facts.kv_tokens.map(|kv| kv as f64 / held.max(1.0)),
            })
            .collect();
        let now = Instant::now();
        self.recent.push_back((now, self.status.tokens));
        while self.recent.len() > 2 && self.recent.front().is_some_and(|(at, _)| now - *at > Duration::from_secs(60)) {
            self.recent.pop_front();
        }
        if let (Some(first), Some(last)) = (self.recent.front(), self.recent.back()) {
            let seconds = (last.0 - first.0).as_secs_f64();
            self.status.tokens_per_s = if seconds > 0.0 { (last.1 - first.1) / seconds } else { 0.0 };
        }
    }

    /// Takes back what is in flight: a server must not go on with answers nobody waits for.
    async fn abort_all(&mut self) {
        let flights: Vec<Flight> = self.flights.drain().map(|(_, flight)| flight).collect();
        let aborts = flights.iter().map(|flight| {
            flight.task.abort();
            self.slots[flight.server].server.abort(&flight.job.rid)
        });
        let all = futures_util::future::join_all(aborts);
        let _ = tokio::time::timeout(Duration::from_secs(10), all).await;
    }

    /// The last lines of the run's files.
    fn finish(&mut self, folder: &Path) -> Result<(), CaptureError> {
        for failed in std::mem::take(&mut self.refused) {
            self.journal.failure(&failed)?;
        }
        self.renew_status();
        self.status_file.append(&self.status)?;
        Flights { at: now(), streaming: self.recipe.stream, flights: vec![] }.write(folder)
    }
}

/// Whether an answer is one: ids the model has, as many as were asked for at most, and at least one.
fn check(answer: Answer, job: &Job, vocab_size: usize) -> Result<Answer, Failure> {
    let later = |says: String| Err(Refusal::Later { status: 200, says }.into());
    let length = answer.output_ids.len();
    if length == 0 {
        return later("an answer without tokens".into());
    }
    if length > job.max_tokens {
        return later(format!("{length} tokens where {} were the most", job.max_tokens));
    }
    match answer.output_ids.iter().find(|&&id| vocab_size > 0 && id as usize >= vocab_size) {
        Some(id) => later(format!("an answer with id {id}, outside the vocabulary of {vocab_size}")),
        None => Ok(answer),
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
