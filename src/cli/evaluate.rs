//! `eaglet evaluate`: acceptance length over held-out sequences, teacher-forced and decoded.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use eaglet::evaluate::decode::Speculator;
use eaglet::signals::Signals;
use eaglet::target::generate::Sampler;
use eaglet::target::rope::RopeTable;
use miette::{IntoDiagnostic, Result, miette};

use super::road::{Road, load_head};
use super::{RecipeArguments, signal_code};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// The head's folder; the recipe's export when not given.
    #[arg(long)]
    head: Option<PathBuf>,
    /// Chain lengths to decode with, 1 to 8; the recipe's `evaluate.k` when not given.
    #[arg(long, value_delimiter = ',')]
    k: Vec<usize>,
    /// Temperatures to decode at, 0 for greedy; the recipe's when not given.
    #[arg(long, value_delimiter = ',')]
    temperature: Vec<f64>,
    /// Skip plain decoding, and with it the speed without the head.
    #[arg(long)]
    no_compare: bool,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let road = Road::open(arguments.recipe.load()?)?;
    let evaluate = &road.recipe.evaluate;
    let ks = if arguments.k.is_empty() { vec![evaluate.k] } else { arguments.k.clone() };
    if let Some(k) = ks.iter().find(|k| !(1..=8).contains(*k)) {
        return Err(miette!("--k {k}: a chain has from 1 to 8 drafts"));
    }
    let temperatures =
        if arguments.temperature.is_empty() { vec![evaluate.temperature] } else { arguments.temperature.clone() };
    if let Some(t) = temperatures.iter().find(|t| !(t.is_finite() && **t >= 0.0)) {
        return Err(miette!("--temperature {t}: it is 0 (greedy) or more"));
    }
    let folder = arguments.head.as_ref().unwrap_or(&road.recipe.export.out);
    let (head, vocab) = load_head(folder, &road.device)?;
    if head.config.aux_layers != road.store.layers {
        return Err(miette!(
            help = "set features.layers to the head's",
            "the head fuses layers {:?}, the recipe extracts {:?}",
            head.config.aux_layers,
            road.store.layers
        ));
    }
    let data = road.data()?;
    let model = road.model()?;
    let signals = Signals::listen().into_diagnostic()?;
    let all: Vec<_> = data.held_out.iter().collect();
    if let Some(signal) = road.extract(&model, &all, &signals)?.interrupted {
        return Ok(signal_code(signal));
    }

    let teacher = road.teacher(&model, &vocab);
    let longest = data.held_out.iter().map(|s| s.ids.len()).max().unwrap_or(0) + 16;
    let rope = RopeTable::new(&head.config.rope, head.config.head_dim, longest, &road.device);
    let steps = ks.iter().copied().max().unwrap_or(1);
    let objective = eaglet::draft::ttt::Objective { steps, ..road.objective() };
    let mut datasets: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for sequence in &data.held_out {
        datasets.entry(&sequence.dataset).or_default().push(sequence);
    }
    datasets.insert("all", data.held_out.iter().collect());
    let mut offline = BTreeMap::new();
    for (name, sequences) in datasets {
        let figures = road.held_out(&model, &sequences)?.evaluate(&head, &vocab, &teacher, &rope, objective);
        offline.insert(name, figures);
    }
    if !arguments.json {
        println!("teacher-forced over the held-out sequences, {steps} steps");
        for (name, figures) in &offline {
            let shares: Vec<String> = figures.chain_accuracy.iter().map(|x| format!("{:.0}%", x * 100.0)).collect();
            println!("  {name:<18} {:>10.3}  {:>7}  {}", figures.acceptance_length, figures.rows, shares.join(" "));
        }
    }
    let mut decoded = Vec::new();
    for &temperature in &temperatures {
        for &k in &ks {
            let compare = !arguments.no_compare;
            let sampler = Sampler { temperature, top_p: 1.0 };
            let speculator = Speculator { model: &model, head: &head, vocab: &vocab, k, sampler };
            let Some(report) = road.decode(&speculator, &data.held_out, compare, &signals)? else {
                return Ok(signal_code(signals.received().unwrap_or_default()));
            };
            if !arguments.json {
                println!("{report}");
            }
            decoded.push(report);
        }
    }
    if arguments.json {
        let value = serde_json::json!({"head": folder, "offline": offline, "decoded": decoded});
        println!("{}", serde_json::to_string_pretty(&value).into_diagnostic()?);
    }
    Ok(ExitCode::SUCCESS)
}
