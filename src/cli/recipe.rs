//! `eaglet recipe show`: the recipe with every key resolved.

use std::process::ExitCode;

use clap::Subcommand;
use miette::Result;

use super::RecipeArguments;

#[derive(Subcommand)]
pub enum Command {
    /// Print the full recipe, every default and override resolved.
    Show(RecipeArguments),
}

pub fn run(command: &Command) -> Result<ExitCode> {
    let Command::Show(arguments) = command;
    print!("{}", arguments.load()?.to_toml());
    Ok(ExitCode::SUCCESS)
}
