//! `eaglet export`: a checkpoint of a run as a served folder.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use eaglet::export::{serve, write_head};
use eaglet::train::checkpoint::Checkpoints;
use miette::{IntoDiagnostic, Result, miette};

use super::RecipeArguments;
use super::road::Road;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// The checkpoint's folder; the newest of the run when not given.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let road = Road::open(arguments.recipe.load()?)?;
    let recipe = &road.recipe;
    let newest = || Checkpoints::new(&recipe.train.out).newest();
    let path = arguments
        .checkpoint
        .clone()
        .or_else(newest)
        .ok_or_else(|| miette!(help = "train first", "no checkpoint under {}", recipe.train.out.display()))?;
    let (vocab, config) = match &recipe.train.init_from {
        Some(folder) => {
            let (head, vocab) = super::road::load_head(folder, &road.device)?;
            (vocab, head.config)
        }
        None => {
            let data = road.data()?;
            let config = road.draft_config()?;
            (road.vocab(&data.train, config.draft_vocab_size)?, config)
        }
    };
    let saved = Checkpoints::load(&path, &config, &road.device).into_diagnostic()?;
    let folder = &recipe.export.out;
    let target_type = &road.files.config.model_type;
    let tensors = saved.head.to_tensors();
    let written =
        write_head(folder, &config, &vocab, &tensors, target_type, &recipe.export.engines).into_diagnostic()?;
    written.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    println!("{} from {}", folder.display(), path.display());
    for (engine, command) in serve::commands(&road.target_name(), folder, recipe.evaluate.k, &recipe.export.engines) {
        println!("{engine:<11} {command}");
    }
    Ok(ExitCode::SUCCESS)
}
