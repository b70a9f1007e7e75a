//! `eaglet capture`: prompts to captured sequences with the embedded engine.

use std::process::ExitCode;

use clap::Args;
use eaglet::capture::{embedded, prompts};
use eaglet::sequences::loops::find_loop;
use eaglet::signals::Signals;
use eaglet::target::{TargetModel, fetch};
use miette::{IntoDiagnostic, Result};

use super::{RecipeArguments, device, signal_code};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let recipe = arguments.recipe.load()?;
    let prompts = prompts::read(&recipe.capture.prompts).into_diagnostic()?;
    let files = fetch::ensure(&recipe.target).into_diagnostic()?;
    let tokenizer = files.tokenizer().into_diagnostic()?;
    let model = TargetModel::load(&files.config, &files, &device(&recipe.target.device)?).into_diagnostic()?;
    let signals = Signals::listen().into_diagnostic()?;
    let captured =
        embedded::capture(&prompts, &recipe.capture, &model, &tokenizer, |ids| find_loop(ids).is_some(), &signals)
            .into_diagnostic()?;
    println!(
        "{} answers captured ({} output tokens, {} cut at the cap, {} loops set apart), {} found from before, in {}",
        captured.captured,
        captured.output_tokens,
        captured.cut,
        captured.looped,
        captured.found,
        recipe.capture.out.display()
    );
    if let Some(signal) = captured.interrupted {
        println!("interrupted; the same command goes on");
        return Ok(signal_code(signal));
    }
    Ok(ExitCode::SUCCESS)
}
