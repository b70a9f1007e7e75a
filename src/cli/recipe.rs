//! `eaglet recipe show`: the recipe with every key resolved.

use std::process::ExitCode;

use clap::Subcommand;
use miette::{IntoDiagnostic, Result};

use super::RecipeArguments;

#[derive(Subcommand)]
pub enum Command {
    /// Print the full recipe, every default and override resolved.
    Show(RecipeArguments),
}

pub fn run(command: &Command) -> Result<ExitCode> {
    let Command::Show(arguments) = command;
    print!("{}", toml::to_string_pretty(&arguments.load()?).into_diagnostic()?);
    Ok(ExitCode::SUCCESS)
}
