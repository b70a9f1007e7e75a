//! `eaglet extract`: the target's hidden states of every sequence, on disk.

use std::process::ExitCode;

use clap::Args;
use eaglet::signals::Signals;
use miette::{IntoDiagnostic, Result};

use super::road::Road;
use super::{RecipeArguments, signal_code};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let road = Road::open(arguments.recipe.load()?)?;
    let data = road.data()?;
    let signals = Signals::listen().into_diagnostic()?;
    let all: Vec<_> = data.train.iter().chain(&data.held_out).collect();
    let done = road.extract(&road.model()?, &all, &signals)?;
    Ok(done.interrupted.map_or(ExitCode::SUCCESS, signal_code))
}
