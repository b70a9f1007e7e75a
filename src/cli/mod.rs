//! The command line: one thin file per command, which wires the stages together.

mod capture;
mod evaluate;
mod export;
mod extract;
mod plan;
mod recipe;
mod road;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::Device;
use clap::{Args, Parser, Subcommand};
use eaglet::recipe::Recipe;
use miette::{IntoDiagnostic, Result, miette};
use tracing_subscriber::EnvFilter;

/// Trains EAGLE-3 draft heads, from captured tokens to a served checkpoint.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ask the target for answers to the recipe's prompts and keep their exact tokens.
    Capture(capture::Arguments),
    /// Tell how long the recipe's capture takes and what would make it shorter.
    Plan(plan::Arguments),
    /// Run the recipe's sequences through the target and keep its hidden states.
    Extract(extract::Arguments),
    /// Train a draft head: sequences, states, training, export, evaluation in one go.
    Train(train::Arguments),
    /// Write a checkpoint of a run as the folder that engines serve.
    Export(export::Arguments),
    /// Measure a head's acceptance length on held-out prompts.
    Evaluate(evaluate::Arguments),
    /// Look at recipes.
    #[command(subcommand)]
    Recipe(recipe::Command),
}

/// Which recipe, and what to change in it.
#[derive(Args)]
struct RecipeArguments {
    /// The recipe, a TOML file.
    #[arg(long)]
    recipe: PathBuf,
    /// Change one key, like `--set train.lr=3e-4`; may be given again.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl RecipeArguments {
    fn load(&self) -> Result<Recipe> {
        Recipe::load(&self.recipe, &self.sets).into_diagnostic()
    }
}

/// Runs the command line and turns its outcome into an exit code.
pub fn run() -> ExitCode {
    let filter = EnvFilter::try_from_env("EAGLET_LOG").unwrap_or_else(|_| EnvFilter::new("warn,eaglet=info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
    let outcome = match Cli::parse().command {
        Command::Capture(arguments) => capture::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Extract(arguments) => extract::run(&arguments),
        Command::Train(arguments) => train::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Evaluate(arguments) => evaluate::run(&arguments),
        Command::Recipe(command) => recipe::run(&command),
    };
    match outcome {
        Ok(code) => code,
        Err(report) => {
            eprintln!("{report:?}");
            ExitCode::FAILURE
        }
    }
}

/// The exit code of a run that a signal ended: 130 for SIGINT, 143 for SIGTERM.
fn signal_code(signal: i32) -> ExitCode {
    ExitCode::from(128 + signal as u8)
}

/// The device a recipe names.
fn device(name: &str) -> Result<Device> {
    match name.split_once(':').unwrap_or((name, "0")) {
        #[cfg(feature = "flex")]
        ("flex", _) => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        ("cuda", index) => Ok(Device::cuda(index.parse::<usize>().into_diagnostic()?)),
        _ => Err(miette!(
            help = "`flex` is the CPU; `cuda` needs a build with `--features cuda`",
            "target.device `{name}` is not in this build"
        )),
    }
}
