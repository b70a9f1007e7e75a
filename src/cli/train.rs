//! `eaglet train`: the whole road, from captured sequences to a served head with its acceptance length.

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use eaglet::draft::config::DraftConfig;
use eaglet::draft::head::DraftHead;
use eaglet::draft::vocab::DraftVocab;
use eaglet::evaluate::decode::Speculator;
use eaglet::evaluate::report::DecodeReport;
use eaglet::export::write::check_folder;
use eaglet::export::{engines, serve, write_head};
use eaglet::recipe::Recipe;
use eaglet::signals::Signals;
use eaglet::target::generate::{Sampler, host_rows};
use eaglet::train::init::{Lent, new_head};
use eaglet::train::trainer::Finished;
use eaglet::train::{Outcome, Trainer};
use miette::{IntoDiagnostic, Result, miette};

use super::road::{Data, Road, load_head};
use super::{RecipeArguments, signal_code};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Go on from the newest checkpoint of the run, if there is one.
    #[arg(long, conflicts_with = "fresh")]
    resume: bool,
    /// Remove the run's checkpoints and metrics first; extracted states stay.
    #[arg(long)]
    fresh: bool,
    /// Print the summary as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let begun = Instant::now();
    let recipe = arguments.recipe.load()?;
    prepare_folder(&recipe, arguments)?;
    // Refused now, not after an hour of training.
    let road = Road::open(recipe)?;
    let mut config = road.draft_config()?;
    check_export(&road, &config)?;
    let signals = Signals::listen().into_diagnostic()?;
    let data = road.data()?;
    if data.train.is_empty() {
        return Err(miette!(help = "name files or folders in data.train", "no training sequences"));
    }

    let model = road.model()?;
    let all: Vec<_> = data.train.iter().chain(&data.held_out).collect();
    if let Some(signal) = road.extract(&model, &all, &signals)?.interrupted {
        return Ok(interrupted(arguments, signal));
    }

    let (vocab, start) = draft_vocab(&road, &data, &mut config)?;
    let teacher = road.teacher(&model, &vocab);
    let head = match start {
        Some(head) => head,
        None => {
            let lent = Lent {
                head_rows: &host_rows(teacher.head_rows.clone()),
                norm: &host_rows(teacher.norm.clone()),
                layer: road.lent_layer(&config)?,
            };
            let tensors = new_head(&config, road.recipe.draft.init, &lent, road.recipe.train.seed);
            DraftHead::from_tensors(config, &tensors, &road.device).into_diagnostic()?
        }
    };
    let held_out: Vec<_> = data.held_out.iter().collect();
    let trainer = Trainer {
        recipe: &road.recipe,
        device: road.device.clone(),
        teacher,
        vocab: &vocab,
        sequences: &data.train,
        load: &|sequence| road.document(sequence),
        held_out: road.held_out(&model, &held_out)?,
        data: road.data_hash(&data.train, &vocab),
        signals: &signals,
    };
    let finished = match trainer.run(head, arguments.resume).into_diagnostic()? {
        Outcome::Finished(finished) => finished,
        Outcome::Interrupted { signal, checkpoint } => {
            eprintln!("saved {}", checkpoint.display());
            return Ok(interrupted(arguments, signal));
        }
    };

    let folder = &road.recipe.export.out;
    let target_type = &road.files.config.model_type;
    let tensors = finished.head.to_tensors();
    let written = write_head(folder, &finished.head.config, &vocab, &tensors, target_type, &road.recipe.export.engines)
        .into_diagnostic()?;
    written.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    // What is measured is what is served: the exported head, rounded to bfloat16.
    let (served, vocab) = load_head(folder, &road.device)?;
    same_logits(&finished.head, &served)?;
    let decoded = match data.held_out.is_empty() {
        true => None,
        false => {
            let evaluate = &road.recipe.evaluate;
            let sampler = Sampler { temperature: evaluate.temperature, top_p: 1.0 };
            let speculator = Speculator { model: &model, head: &served, vocab: &vocab, k: evaluate.k, sampler };
            match road.decode(&speculator, &data.held_out, true, &signals)? {
                Some(report) => Some(report),
                None => return Ok(interrupted(arguments, signals.received().unwrap_or_default())),
            }
        }
    };
    summary(&road, &finished, decoded.as_ref(), begun, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Everything that the export would refuse for its options or its place.
fn check_export(road: &Road, config: &DraftConfig) -> Result<()> {
    let export = &road.recipe.export;
    engines::check_engines(config, &export.engines).into_diagnostic()?;
    engines::check_target(config, &road.files.config.model_type, &export.engines).into_diagnostic()?;
    check_folder(&export.out).into_diagnostic()
}

/// Makes the run folder and stores the resolved recipe in it; refuses one that holds a run nobody spoke of.
fn prepare_folder(recipe: &Recipe, arguments: &Arguments) -> Result<()> {
    let run = &recipe.train.out;
    let checkpoints = run.join("checkpoints");
    if arguments.fresh {
        if checkpoints.exists() {
            std::fs::remove_dir_all(&checkpoints).into_diagnostic()?;
        }
        let metrics = run.join("metrics.jsonl");
        if metrics.exists() {
            std::fs::remove_file(metrics).into_diagnostic()?;
        }
    }
    let holds_a_run = std::fs::read_dir(&checkpoints).is_ok_and(|mut entries| entries.next().is_some());
    if holds_a_run && !arguments.resume {
        return Err(miette!(
            help = "go on with --resume, begin anew with --fresh, or train into another folder: --set train.out=DIR",
            "{} already holds a run",
            run.display()
        ));
    }
    std::fs::create_dir_all(run).into_diagnostic()?;
    let mut file = tempfile::NamedTempFile::new_in(run).into_diagnostic()?;
    std::io::Write::write_all(&mut file, recipe.to_toml().as_bytes()).into_diagnostic()?;
    file.persist(run.join("recipe.toml")).into_diagnostic()?;
    Ok(())
}

/// The draft vocabulary: counted, or that of the head that training starts from, which then also gives the shape.
fn draft_vocab(road: &Road, data: &Data, config: &mut DraftConfig) -> Result<(DraftVocab, Option<DraftHead>)> {
    if let Some(folder) = &road.recipe.train.init_from {
        let (head, vocab) = load_head(folder, &road.device)?;
        if head.config.aux_layers != road.store.layers {
            return Err(miette!(
                help = "set features.layers to the head's",
                "{} fuses layers {:?}, the recipe extracts {:?}",
                folder.display(),
                head.config.aux_layers,
                road.store.layers
            ));
        }
        let target = &road.files.config;
        if (head.config.vocab_size, head.config.target_hidden_size) != (target.vocab_size, target.hidden_size) {
            return Err(miette!("{} is a head for another target", folder.display()));
        }
        eprintln!("head: starting from {}, with its shape and its {} draft tokens", folder.display(), vocab.len());
        *config = head.config.clone();
        return Ok((vocab, Some(head)));
    }
    let vocab = road.vocab(&data.train, config.draft_vocab_size)?;
    Ok((vocab, None))
}

/// The exported head, read back, must speak like the trained one but for bfloat16 rounding.
fn same_logits(trained: &DraftHead, served: &DraftHead) -> Result<()> {
    let hidden = trained.config.hidden_size;
    let device = trained.weight("norm.weight").device();
    let data: Vec<f32> = (0..4 * hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let probe = burn::tensor::Tensor::from_data(burn::tensor::TensorData::new(data, [4, hidden]), &device);
    let [a, b] = [trained, served].map(|head| host_rows(head.logits(probe.clone())));
    let size: f32 = a.iter().map(|x| x * x).sum::<f32>().sqrt();
    let off: f32 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt() / size;
    // bfloat16 keeps 8 bits: each weight is off by at most 0.4%.
    if off > 0.01 {
        return Err(miette!("the exported head's logits are off by {off:.4} of their norm; nothing should be served"));
    }
    Ok(())
}

fn interrupted(arguments: &Arguments, signal: i32) -> ExitCode {
    let sets: String = arguments.recipe.sets.iter().map(|set| format!(" --set {set}")).collect();
    eprintln!("interrupted; go on with: eaglet train --recipe {}{sets} --resume", arguments.recipe.recipe.display());
    signal_code(signal)
}

fn summary(road: &Road, finished: &Finished, decoded: Option<&DecodeReport>, begun: Instant, json: bool) -> Result<()> {
    let recipe = &road.recipe;
    let commands = serve::commands(&road.target_name(), &recipe.export.out, recipe.evaluate.k, &recipe.export.engines);
    let seconds = begun.elapsed().as_secs_f64();
    if json {
        let value = serde_json::json!({
            "steps": finished.steps, "tokens": finished.tokens, "loss": finished.loss,
            "train_tokens_per_second": finished.tokens_per_second, "held_out": finished.held_out,
            "decoded": decoded, "head": recipe.export.out, "seconds": seconds,
            "commands": commands.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        });
        println!("{}", serde_json::to_string_pretty(&value).into_diagnostic()?);
        return Ok(());
    }
    println!();
    println!(
        "trained     {} tokens in {} steps, {:.0} tokens/s; loss {:.3}",
        finished.tokens, finished.steps, finished.tokens_per_second, finished.loss
    );
    if let Some(figures) = &finished.held_out {
        let shares = |shares: &[f64]| shares.iter().map(|x| format!("{x:.3}")).collect::<Vec<_>>().join(" ");
        println!("held out    loss {:.3}; accuracy per step {}", figures.loss, shares(&figures.accuracy));
        println!("            given the steps before {}", shares(&figures.conditional_accuracy));
        println!("            acceptance length {:.3} (teacher-forced)", figures.acceptance_length);
    }
    if let Some(report) = decoded {
        println!("decoded     {report}");
        println!(
            "acceptance length {:.3} (k = {}, greedy = {})",
            report.acceptance_length,
            report.k,
            report.temperature <= 0.0
        );
    }
    println!("head        {}", recipe.export.out.display());
    for (engine, command) in commands {
        println!("{engine:<11} {command}");
    }
    println!("time        {}", indicatif::HumanDuration(std::time::Duration::from_secs_f64(seconds)));
    Ok(())
}
