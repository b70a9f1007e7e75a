//! `eaglet plan`: how long a capture takes, and what would make it shorter.

use std::process::ExitCode;

use clap::Args;
use eaglet::plan::levers::Hardware;
use eaglet::plan::{forecast, observe, report};
use eaglet::target::family::Family;
use miette::{IntoDiagnostic, Result};

use super::RecipeArguments;
use super::capture::{LiveOptions, capture_live, marks, own_tokenizer};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// First capture so many answers, spread over the datasets; they count as the run's own.
    #[arg(long, value_name = "ANSWERS")]
    pilot: Option<usize>,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
    /// Memory of one of the server's GPUs in GB.
    #[arg(long, default_value_t = 80.0)]
    gpu_gb: f64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let recipe = arguments.recipe.load()?;
    if let Some(answers) = arguments.pilot {
        let options = LiveOptions { pilot: Some(answers), retry_failed: false, grace: 20.0, json: false };
        if let Some(signal) = capture_live(&recipe, &options)?.interrupted {
            return Ok(super::signal_code(signal));
        }
    }
    let family = recipe.target.family.as_deref().map(Family::named).transpose().into_diagnostic()?;
    let marks = marks(&recipe, family.as_ref(), own_tokenizer(&recipe)?.as_ref());
    let sight = observe::look(&recipe, &marks).into_diagnostic()?;
    let hardware = Hardware { gpu_bytes: arguments.gpu_gb * 1e9 };
    let plan = report::plan(&recipe, family.as_ref(), &marks, &sight, hardware, forecast::DRAWS).into_diagnostic()?;
    match arguments.json {
        true => println!("{}", serde_json::json!(plan)),
        false => print!("{}", plan.text()),
    }
    Ok(ExitCode::SUCCESS)
}
