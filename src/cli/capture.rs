//! `eaglet capture`: prompts to captured sequences, from live servers or with the embedded engine.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use eaglet::capture::live::{self, Outcome, Setup};
use eaglet::capture::prompts::{self, Prompts};
use eaglet::capture::reasoning::Marks;
use eaglet::capture::render::Renderer;
use eaglet::capture::status::{Status, hours};
use eaglet::capture::{embedded, http, journal};
use eaglet::plan::observe::time_left;
use eaglet::recipe::{EngineKind, Recipe, Render};
use eaglet::sequences::loops::find_loop;
use eaglet::signals::Signals;
use eaglet::target::family::Family;
use eaglet::target::{TargetFiles, TargetModel, TargetTokenizer, fetch};
use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Result, miette};

use super::{RecipeArguments, device, signal_code};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Print the figures of the run as JSON lines, one each five seconds.
    #[arg(long)]
    json: bool,
    /// Ask again what servers refused for good in an earlier run.
    #[arg(long)]
    retry_failed: bool,
    /// Seconds that answers in flight may still take after SIGINT or SIGTERM before they are aborted.
    #[arg(long, default_value_t = 20.0)]
    grace: f64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let recipe = arguments.recipe.load()?;
    if recipe.capture.engine == EngineKind::Embedded {
        return run_embedded(&recipe);
    }
    let options =
        LiveOptions { pilot: None, retry_failed: arguments.retry_failed, grace: arguments.grace, json: arguments.json };
    let outcome = capture_live(&recipe, &options)?;
    report(&recipe, &outcome)?;
    Ok(outcome.interrupted.map_or(ExitCode::SUCCESS, signal_code))
}

/// How a live capture is run.
pub struct LiveOptions {
    /// Ask for only so many answers, spread over the datasets.
    pub pilot: Option<usize>,
    pub retry_failed: bool,
    pub grace: f64,
    pub json: bool,
}

/// Captures from the recipe's servers.
pub fn capture_live(recipe: &Recipe, options: &LiveOptions) -> Result<Outcome> {
    let family = recipe.target.family.as_deref().map(Family::named).transpose().into_diagnostic()?;
    let tokenizer = own_tokenizer(recipe)?;
    let prompts = read_prompts(recipe)?;
    let key = http::api_key(&recipe.capture).into_diagnostic()?;
    let signals = Signals::listen().into_diagnostic()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().into_diagnostic()?;
    runtime.block_on(async {
        let (servers, identity) = live::connect(&recipe.capture, key.as_deref()).await.into_diagnostic()?;
        for server in &servers {
            let facts = &server.facts;
            eprintln!(
                "{}: {} {} serves {} with a context of {} and KV room for {} tokens",
                server.url,
                server.engine.name(),
                facts.version.as_deref().unwrap_or(""),
                facts.model,
                facts.context,
                facts.kv_tokens.map_or("an unknown number of".into(), |n| n.to_string())
            );
        }
        let marks = marks(recipe, family.as_ref(), tokenizer.as_ref());
        let vocab_size = vocab_size(recipe, family.as_ref(), servers[0].facts.vocab_size);
        if vocab_size == 0 {
            tracing::warn!("the vocabulary's size is unknown, so ids go unchecked; set capture.vocab_size");
        }
        if let (Some(own), true) = (&tokenizer, !identity.probe.is_empty())
            && own.encode(http::PROBE).into_diagnostic()? != identity.probe
        {
            return Err(miette!(
                help = "point target.path at the served model's own files, or set capture.render = \"server\"",
                "{}: its tokenizer and the one at {} cut a probe text otherwise",
                servers[0].url,
                recipe.target.path.display()
            ));
        }
        let renderer = match tokenizer {
            Some(tokenizer) => Renderer::Tokenizer(Box::new(tokenizer)),
            None => Renderer::Server(Box::new(servers[0].clone())),
        };
        eprintln!("prompts are rendered by the {}", renderer.name());
        let setup = Setup {
            recipe: &recipe.capture,
            servers,
            renderer,
            prompts,
            marks,
            vocab_size,
            pilot: options.pilot,
            retry_failed: options.retry_failed,
            grace: Duration::from_secs_f64(options.grace.max(0.0)),
        };
        let mut screen = Screen::new(options.json);
        let mut left = time_left(recipe);
        let done = live::capture(setup, &identity, &signals, &mut left, &mut |status| screen.show(status)).await;
        screen.clear();
        done.into_diagnostic()
    })
}

/// Tells what a live capture did, and makes the files that training reads.
pub fn report(recipe: &Recipe, outcome: &Outcome) -> Result<()> {
    let split = journal::split(&recipe.capture.out, recipe.capture.held_out_share, |ids| find_loop(ids).is_some())
        .into_diagnostic()?;
    let status = &outcome.status;
    let (done, wanted) = status.done();
    println!(
        "{} answers captured ({:.0} output tokens in {}), {} found from before, {done} of {wanted} in all",
        status.answers,
        status.tokens,
        hours(outcome.seconds / 3600.0),
        outcome.found,
    );
    println!(
        "{} cut at the cap, {} with reasoning, {} retries, {} failed (failed.jsonl)",
        status.capped, status.reasoned, status.retries, status.failed
    );
    println!(
        "{} prompts not asked (skipped.jsonl), {} duplicates, {} left off by `take`",
        outcome.skipped, outcome.duplicates, outcome.left_off
    );
    println!(
        "in {}: {} to train on, {} held out, {} loops set apart",
        recipe.capture.out.display(),
        split.train,
        split.held_out,
        split.looped
    );
    if outcome.interrupted.is_some() {
        println!("interrupted; the same command goes on");
    }
    Ok(())
}

fn run_embedded(recipe: &Recipe) -> Result<ExitCode> {
    let prompts = read_prompts(recipe)?;
    let family = recipe.target.family.as_deref().map(Family::named).transpose().into_diagnostic()?;
    let files = fetch::ensure(&recipe.target).into_diagnostic()?;
    let tokenizer = files.tokenizer().into_diagnostic()?;
    let model = TargetModel::load(&files.config, &files, &device(&recipe.target.device)?).into_diagnostic()?;
    let signals = Signals::listen().into_diagnostic()?;
    let marks = marks(recipe, family.as_ref(), Some(&tokenizer));
    let captured = embedded::capture(&prompts.prompts, &recipe.capture, &model, tokenizer, &marks, &signals);
    let captured = captured.into_diagnostic()?;
    let split = journal::split(&recipe.capture.out, recipe.capture.held_out_share, |ids| find_loop(ids).is_some())
        .into_diagnostic()?;
    println!(
        "{} answers captured ({} output tokens, {} cut at the cap), {} found from before; in {}: {} to train on, \
         {} held out, {} loops set apart",
        captured.captured,
        captured.output_tokens,
        captured.cut,
        captured.found,
        recipe.capture.out.display(),
        split.train,
        split.held_out,
        split.looped
    );
    if let Some(signal) = captured.interrupted {
        println!("interrupted; the same command goes on");
        return Ok(signal_code(signal));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the recipe's prompts and tells what was left out.
fn read_prompts(recipe: &Recipe) -> Result<Prompts> {
    let read = prompts::read(&recipe.capture.prompts, recipe.data.on_bad).into_diagnostic()?;
    read.bad.iter().for_each(|reason| tracing::warn!("{reason}"));
    for (file, count) in &read.bad_rows {
        eprintln!("{file}: {count} rows are no prompts and are left out");
    }
    if read.prompts.is_empty() {
        return Err(miette!("no prompts to ask; name some in capture.prompts"));
    }
    Ok(read)
}

/// The target's own template and tokenizer, where the recipe wants them and they are there.
pub fn own_tokenizer(recipe: &Recipe) -> Result<Option<TargetTokenizer>> {
    if recipe.capture.render == Render::Server {
        return Ok(None);
    }
    let path = &recipe.target.path;
    let read = match path.is_dir() && path.join("tokenizer.json").is_file() {
        // Only the tokenizer is wanted; the weights may be far too many to have here.
        true => TargetTokenizer::from_folder(path),
        false => TargetFiles::open(path).and_then(|files| files.tokenizer()),
    };
    match read {
        Ok(tokenizer) if tokenizer.has_template() => Ok(Some(tokenizer)),
        Err(error) if recipe.capture.render == Render::Tokenizer => Err(error).into_diagnostic(),
        Ok(_) if recipe.capture.render == Render::Tokenizer => Err(miette!("{}: no chat template", path.display())),
        _ => Ok(None),
    }
}

/// The ids that open and close thinking and tool calls.
pub fn marks(recipe: &Recipe, family: Option<&Family>, tokenizer: Option<&TargetTokenizer>) -> Marks {
    let named = |open: &str, close: &str| Some((tokenizer?.token_id(open)?, tokenizer?.token_id(close)?));
    let reasoning = match recipe.capture.reasoning_tokens[..] {
        [open, close] => Some((open, close)),
        _ => family.and_then(|f| f.reasoning).map(|r| (r.start, r.end)).or_else(|| named("<think>", "</think>")),
    };
    let tool_calls = family.and_then(|f| f.tool_calls).map(|t| (t.start, t.end));
    Marks { reasoning, tool_calls: tool_calls.or_else(|| named("<tool_call>", "</tool_call>")) }
}

fn vocab_size(recipe: &Recipe, family: Option<&Family>, told: Option<usize>) -> usize {
    // A config of text within a config of more (Kimi-K2.5) is not one the embedded engine reads, so only the key is.
    let config = || {
        let text = std::fs::read_to_string(recipe.target.path.join("config.json")).ok()?;
        let json: serde_json::Value = serde_json::from_str(&text).ok()?;
        let size = json.get("vocab_size").or_else(|| json.pointer("/text_config/vocab_size"))?;
        size.as_u64().map(|n| n as usize)
    };
    let known = [Some(recipe.capture.vocab_size).filter(|&n| n > 0), family.map(|f| f.vocab_size), told];
    known.into_iter().flatten().next().or_else(config).unwrap_or(0)
}

/// The live screen: drawn anew each second on a terminal, a line each ten seconds elsewhere.
struct Screen {
    bar: ProgressBar,
    json: bool,
    told: Option<std::time::Instant>,
}

impl Screen {
    fn new(json: bool) -> Self {
        let style = ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        Self { bar: ProgressBar::new_spinner().with_style(style), json, told: None }
    }

    fn show(&mut self, status: &Status) {
        self.bar.set_message(status.screen());
        let every = Duration::from_secs(if self.json { 5 } else { 10 });
        if self.told.is_some_and(|told| told.elapsed() < every) {
            return;
        }
        self.told = Some(std::time::Instant::now());
        if self.json {
            println!("{}", serde_json::json!(status));
        }
        if self.bar.is_hidden() {
            tracing::info!("{}", status.line());
        }
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
