//! `eaglet plan`: how long a capture takes, and what would make it shorter.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use eaglet::plan::levers::Hardware;
use eaglet::plan::{budget::Budget, observe, page, report};
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
    /// Hours from now (`24h`, `90min`, `2d`) or output tokens in all (`60Mtok`) to keep to: proposes each dataset's number
    /// and cap, and writes them as a recipe.
    #[arg(long)]
    budget: Option<String>,
    /// Where that recipe goes [default: beside the recipe, as NAME.BUDGET.toml].
    #[arg(long, value_name = "FILE", requires = "budget")]
    out: Option<PathBuf>,
    /// Write the plan as one HTML page that needs nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
    /// Memory of one of the server's GPUs in GB.
    #[arg(long, default_value_t = 80.0)]
    gpu_gb: f64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let recipe = arguments.recipe.load()?;
    let budget = arguments.budget.as_deref().map(str::parse::<Budget>).transpose().into_diagnostic()?;
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
    let mut plan = report::plan(&recipe, family.as_ref(), &marks, &sight, hardware, budget).into_diagnostic()?;
    if let (Some(proposal), Some(name)) = (&mut plan.budget, &arguments.budget) {
        let beside = || arguments.recipe.recipe.with_extension(format!("{name}.toml"));
        let path = arguments.out.clone().unwrap_or_else(beside);
        write_whole(&path, proposal.recipe.to_toml().as_bytes()).into_diagnostic()?;
        proposal.written = Some(path);
    }
    if let Some(path) = &arguments.html {
        write_whole(path, page::html(&plan).as_bytes()).into_diagnostic()?;
    }
    match arguments.json {
        true => println!("{}", serde_json::json!(plan)),
        false => print!("{}", plan.text()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a file beside its place and renames it.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}
