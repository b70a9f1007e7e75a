//! Reads a recipe: TOML, overrides, paths, ranges.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::{CaptureRecipe, Concurrency, EngineKind, Recipe, Regenerate};

/// What is wrong with a recipe, and where.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// Not TOML, or a value of another type.
    #[error("{place}: {reason}")]
    Toml { place: String, reason: String },
    /// A key that no recipe has.
    #[error("{place}: unknown key `{key}`; the nearest known one is `{nearest}`")]
    Unknown { place: String, key: String, nearest: String },
    /// A value outside its range.
    #[error("{place}: `{key}` is {value}; {wanted}")]
    Range { place: String, key: &'static str, value: String, wanted: &'static str },
}

/// Keys whose default is absent; the others are known from the defaults themselves.
const OPTIONAL: [&str; 17] = [
    "target.family",
    "target.hub",
    "target.pip",
    "train.init_from",
    "capture.api_key_env",
    "capture.api_key_file",
    "capture.class.name",
    "capture.class.datasets",
    "capture.class.min_prompt_tokens",
    "capture.class.max_prompt_tokens",
    "capture.class.max_tokens",
    "capture.class.temperature",
    "capture.class.top_p",
    "capture.class.top_k",
    "capture.class.samples",
    "capture.class.take",
    "capture.class.concurrency",
];

impl Recipe {
    /// Reads a recipe, applies overrides of the form `train.lr=3e-4`, and makes paths absolute: those in the file
    /// and those in overrides are relative to the file's folder; `features.cache` and `export.out` to the run folder.
    ///
    /// # Errors
    /// When the file is not TOML, a key is unknown, or a value is of another type or outside its range; each names
    /// the file and line, or the override.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, RecipeError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| RecipeError::Io { path: path.to_path_buf(), source })?;
        let base = std::path::absolute(path).ok().and_then(|p| p.parent().map(Path::to_path_buf)).unwrap_or_default();
        Self::parse(&text, &path.display().to_string(), overrides, &base)
    }

    /// [`Recipe::load`] of a text that is called `name` in errors.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn parse(text: &str, name: &str, overrides: &[String], base: &Path) -> Result<Self, RecipeError> {
        let syntax = |e: toml::de::Error| RecipeError::Toml {
            place: e.span().map_or(name.to_string(), |span| format!("{name}:{}", line_of(text, span.start))),
            reason: e.message().to_string(),
        };
        let table: Table = toml::from_str(text).map_err(syntax)?;
        let known = known_keys();
        let place_of = |key: &str| format!("{name}:{}", find_line(text, key));
        check_keys(&table, &known, &place_of)?;
        // Read once as it stands, so that a wrong type is reported with its line.
        let _: Self = toml::from_str(text).map_err(syntax)?;

        let mut table = table;
        for given in overrides {
            let place = format!("--set {given}");
            let (key, value) = given.split_once('=').ok_or_else(|| RecipeError::Toml {
                place: place.clone(),
                reason: "an override has the form key=value, like train.lr=3e-4".into(),
            })?;
            let key = key.trim();
            if !known.iter().any(|k| k == key) {
                let nearest = nearest(key, &known);
                return Err(RecipeError::Unknown { place, key: key.into(), nearest });
            }
            // What is no TOML value is a text without its quotes.
            let parsed = toml::from_str::<Table>(&format!("v = {value}")).ok().and_then(|mut t| t.remove("v"));
            let value = parsed.unwrap_or_else(|| Value::String(value.to_string()));
            let (section, rest) = key.split_once('.').unwrap_or(("", key));
            let section = table.entry(section.to_string()).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = section {
                section.insert(rest.to_string(), value);
            }
            let checked: Result<Self, _> = table.clone().try_into();
            checked.map_err(|e| RecipeError::Toml { place, reason: e.message().to_string() })?;
        }
        let mut recipe: Self = table
            .try_into()
            .map_err(|e: toml::de::Error| RecipeError::Toml { place: name.into(), reason: e.message().to_string() })?;
        recipe.check(
            &|key| match overrides.iter().rfind(|o| o.split('=').next().is_some_and(|k| k.trim() == key)) {
                Some(given) => format!("--set {given}"),
                None => place_of(key),
            },
        )?;
        recipe.resolve(base);
        Ok(recipe)
    }

    /// The full recipe, every key resolved, as TOML that loads to the same recipe.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).unwrap_or_default()
    }

    fn resolve(&mut self, base: &Path) {
        let absolute = |path: &mut PathBuf| *path = clean(&base.join(&*path));
        let Self { target, data, capture, train, features, export, .. } = self;
        [&mut target.path, &mut capture.out, &mut train.out].into_iter().for_each(absolute);
        data.train.iter_mut().chain(&mut data.held_out).for_each(absolute);
        capture.prompts.iter_mut().filter(|p| !is_hub(p)).for_each(absolute);
        capture.api_key_file.iter_mut().chain(&mut train.init_from).for_each(absolute);
        features.cache = clean(&train.out.join(&features.cache));
        export.out = clean(&train.out.join(&export.out));
    }

    fn check(&self, place: &dyn Fn(&str) -> String) -> Result<(), RecipeError> {
        let Self { target, data, capture, features, draft, train, export, evaluate } = self;
        let rule = |holds: bool, key: &'static str, value: String, wanted: &'static str| match holds {
            true => Ok(()),
            false => Err(RecipeError::Range { place: place(key), key, value, wanted }),
        };
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let not_negative = |x: f64| x.is_finite() && x >= 0.0;
        let device = match target.device.split_once(':') {
            None => matches!(target.device.as_str(), "flex" | "cuda"),
            Some((kind, index)) => kind == "cuda" && index.parse::<usize>().is_ok(),
        };
        rule(device, "target.device", target.device.clone(), "it must be `flex`, `cuda` or `cuda:0`, `cuda:1`, ...")?;
        rule(data.max_length >= 2, "data.max_length", data.max_length.to_string(), "it must be at least 2")?;
        rule(
            not_negative(capture.temperature),
            "capture.temperature",
            capture.temperature.to_string(),
            "it must be 0 (greedy) or more",
        )?;
        rule(
            positive(capture.top_p) && capture.top_p <= 1.0,
            "capture.top_p",
            capture.top_p.to_string(),
            "it must be above 0 and at most 1",
        )?;
        rule(capture.max_tokens > 0, "capture.max_tokens", "0".into(), "it must be at least 1")?;
        rule(capture.batch > 0, "capture.batch", "0".into(), "it must be at least 1")?;
        rule(capture.samples > 0, "capture.samples", "0".into(), "it must be at least 1")?;
        rule(
            capture.engine == EngineKind::Embedded || !capture.servers.is_empty(),
            "capture.servers",
            "[]".into(),
            "an engine that is not embedded needs the address of a server, like `http://127.0.0.1:30000`",
        )?;
        let odd = capture.servers.iter().find(|s| !s.starts_with("http://") && !s.starts_with("https://"));
        rule(odd.is_none(), "capture.servers", format!("{odd:?}"), "addresses begin with http:// or https://")?;
        rule(
            matches!(capture.reasoning_tokens.len(), 0 | 2),
            "capture.reasoning_tokens",
            format!("{:?}", capture.reasoning_tokens),
            "two ids are wanted: the one that opens reasoning and the one that closes it",
        )?;
        rule(
            positive(capture.idle_timeout_s),
            "capture.idle_timeout_s",
            capture.idle_timeout_s.to_string(),
            "it must be above 0",
        )?;
        let fixed = std::iter::once(capture.concurrency).chain(capture.class.iter().filter_map(|c| c.concurrency));
        rule(
            fixed.into_iter().all(|c| c != Concurrency::Fixed(0)),
            "capture.concurrency",
            "0".into(),
            "it must be `auto` or at least 1",
        )?;
        rule(
            capture.regenerate == Regenerate::Last || samples(capture) == 1,
            "capture.samples",
            samples(capture).to_string(),
            "with regenerate = \"all\" each turn builds on the one before, so there is one answer to each",
        )?;
        for class in &capture.class {
            let odd = class.datasets.iter().find(|d| glob::Pattern::new(d).is_err());
            rule(
                odd.is_none(),
                "capture.class",
                format!("{:?}", odd.map_or("", String::as_str)),
                "datasets are names, in which `*`, `?` and `[…]` stand for letters; `[` itself is written `[[]`",
            )?;
            let good = class.max_tokens != Some(0)
                && class.samples != Some(0)
                && class.temperature.is_none_or(not_negative)
                && class.top_p.is_none_or(|p| positive(p) && p <= 1.0);
            rule(
                good,
                "capture.class",
                format!("{:?}", class.name),
                "max_tokens and samples are at least 1, temperature at least 0, top_p above 0 and at most 1",
            )?;
        }
        rule(
            share(capture.held_out_share),
            "capture.held_out_share",
            capture.held_out_share.to_string(),
            "it is a share, from 0 to 1",
        )?;
        rule(
            features.layers.windows(2).all(|w| w[0] < w[1]),
            "features.layers",
            format!("{:?}", features.layers),
            "layers must ascend, each once",
        )?;
        rule(features.batch_tokens > 0, "features.batch_tokens", "0".into(), "it must be at least 1")?;
        rule(
            matches!(features.dtype.as_str(), "f32" | "bf16" | "f16"),
            "features.dtype",
            features.dtype.clone(),
            "it must be `f32`, `bf16` or `f16`",
        )?;
        rule(draft.vocab_size > 0, "draft.vocab_size", "0".into(), "it must be at least 1")?;
        rule(
            (1..=8).contains(&train.ttt_steps),
            "train.ttt_steps",
            train.ttt_steps.to_string(),
            "it must be from 1 to 8",
        )?;
        rule(
            positive(train.step_decay) && train.step_decay <= 1.0,
            "train.step_decay",
            train.step_decay.to_string(),
            "it must be above 0 and at most 1",
        )?;
        rule(train.epochs > 0, "train.epochs", "0".into(), "it must be at least 1")?;
        rule(train.pack_tokens > 0, "train.pack_tokens", "0".into(), "it must be at least 1")?;
        rule(train.accumulate > 0, "train.accumulate", "0".into(), "it must be at least 1")?;
        rule(positive(train.lr), "train.lr", train.lr.to_string(), "it must be above 0")?;
        rule(share(train.warmup), "train.warmup", train.warmup.to_string(), "it is a share of the steps, from 0 to 1")?;
        rule(
            share(train.final_lr_share),
            "train.final_lr_share",
            train.final_lr_share.to_string(),
            "it is a share of train.lr, from 0 to 1",
        )?;
        rule(
            not_negative(train.beta1) && train.beta1 < 1.0,
            "train.beta1",
            train.beta1.to_string(),
            "it must be from 0 to below 1",
        )?;
        rule(
            not_negative(train.beta2) && train.beta2 < 1.0,
            "train.beta2",
            train.beta2.to_string(),
            "it must be from 0 to below 1",
        )?;
        rule(positive(train.eps), "train.eps", train.eps.to_string(), "it must be above 0")?;
        rule(
            not_negative(train.weight_decay),
            "train.weight_decay",
            train.weight_decay.to_string(),
            "it must be 0 or more",
        )?;
        rule(not_negative(train.clip), "train.clip", train.clip.to_string(), "it must be 0 (no clipping) or more")?;
        rule(train.keep > 0, "train.keep", "0".into(), "at least one checkpoint must be kept to resume from")?;
        let engine = export.engines.iter().find(|e| !matches!(e.as_str(), "vllm" | "sglang" | "llama.cpp"));
        rule(
            engine.is_none(),
            "export.engines",
            format!("{engine:?}"),
            "engines are `vllm`, `sglang` and `llama.cpp`",
        )?;
        rule((1..=8).contains(&evaluate.k), "evaluate.k", evaluate.k.to_string(), "it must be from 1 to 8")?;
        rule(evaluate.max_tokens > 0, "evaluate.max_tokens", "0".into(), "it must be at least 1")?;
        rule(evaluate.batch > 0, "evaluate.batch", "0".into(), "it must be at least 1")?;
        rule(
            not_negative(evaluate.temperature),
            "evaluate.temperature",
            evaluate.temperature.to_string(),
            "it must be 0 (greedy) or more",
        )
    }
}

/// Every key, dotted, sorted.
fn known_keys() -> Vec<String> {
    let mut keys: Vec<String> = OPTIONAL.iter().map(|key| key.to_string()).collect();
    if let Ok(Value::Table(table)) = Value::try_from(Recipe::default()) {
        for (section, inner) in table {
            if let Value::Table(inner) = inner {
                keys.extend(inner.keys().map(|key| format!("{section}.{key}")));
            }
        }
    }
    keys.sort();
    keys
}

fn check_keys(table: &Table, known: &[String], place: &dyn Fn(&str) -> String) -> Result<(), RecipeError> {
    let unknown = |key: String, among: &[String]| {
        let nearest = nearest(&key, among);
        Err(RecipeError::Unknown { place: place(&key), key, nearest })
    };
    for (section, inner) in table {
        let prefix = format!("{section}.");
        let Value::Table(inner) = inner else {
            // A key outside any section: `lr = 1` was meant for `train.lr`.
            return unknown(section.clone(), known);
        };
        if !known.iter().any(|key| key.starts_with(&prefix)) {
            let mut sections: Vec<String> =
                known.iter().filter_map(|k| k.split('.').next()).map(str::to_string).collect();
            sections.dedup();
            return unknown(section.clone(), &sections);
        }
        for (key, value) in inner {
            let dotted = format!("{section}.{key}");
            if !known.contains(&dotted) {
                return unknown(dotted, known);
            }
            for item in value.as_array().into_iter().flatten().filter_map(Value::as_table).flat_map(Table::keys) {
                let deeper = format!("{dotted}.{item}");
                if !known.contains(&deeper) {
                    return unknown(deeper, known);
                }
            }
        }
    }
    Ok(())
}

/// The known key most like this one: by the whole dotted name, or by its last part where that fits better.
fn nearest(key: &str, known: &[String]) -> String {
    let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_string();
    let likeness = |k: &String| strsim::jaro_winkler(k, key).max(0.99 * strsim::jaro_winkler(&last(k), &last(key)));
    known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).cloned().unwrap_or_default()
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1
}

/// The line of a dotted key: its last part, in its section where the file has one.
fn find_line(text: &str, key: &str) -> usize {
    let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
    let (header, array) = (format!("[{section}]"), format!("[[{section}]]"));
    let mut here = section.is_empty();
    let mut found = 1;
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            here = line == header || line == array;
            if here || line == format!("[{name}]") {
                found = i + 1;
            }
        }
        if line.starts_with(&format!("{key} ")) || line.starts_with(&format!("{key}=")) {
            return i + 1;
        }
        if here && line.strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with('=')) {
            return i + 1;
        }
    }
    found
}

/// Whether a prompt source names a dataset of the hub.
/// The most answers that any prompt gets.
fn samples(capture: &CaptureRecipe) -> usize {
    capture.class.iter().filter_map(|c| c.samples).fold(capture.samples, usize::max)
}

fn is_hub(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("hub:"))
}

/// A path without `.` and `..`, by its text alone.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::CurDir => {}
            std::path::Component::ParentDir if out.file_name().is_some() => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str, sets: &[&str]) -> Result<Recipe, RecipeError> {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Recipe::parse(text, "r.toml", &sets, Path::new("/base/recipes"))
    }

    #[test]
    fn an_empty_recipe_is_valid_and_paths_stand_beside_it() {
        let recipe = parse("[train]\nout = \"../runs/a\"\n[data]\ntrain = [\"../data/x\"]", &[]).unwrap();
        assert_eq!(recipe.train.out, Path::new("/base/runs/a"));
        assert_eq!(recipe.data.train, [Path::new("/base/data/x")]);
        assert_eq!(recipe.features.cache, Path::new("/base/runs/a/features"));
        assert_eq!(parse("", &[]).unwrap().train.ttt_steps, Recipe::default().train.ttt_steps);
    }

    #[test]
    fn a_shown_recipe_loads_to_itself() {
        let recipe = parse("[target]\nhub = \"a/b\"\n[draft]\nvocab_size = 99", &["train.lr=3e-4"]).unwrap();
        assert_eq!(parse(&recipe.to_toml(), &[]).unwrap(), recipe);
    }

    #[test]
    fn overrides_are_toml_values_or_plain_text() {
        let sets = ["train.lr=3e-4", "target.device=cuda:1", "features.layers=[1, 2, 3]", "train.loss=lk_hybrid"];
        let recipe = parse("[train]\nlr = 1.0", &sets).unwrap();
        assert_eq!((recipe.train.lr, recipe.target.device.as_str()), (3e-4, "cuda:1"));
        assert_eq!(recipe.features.layers, [1, 2, 3]);
        // A whole number is a fine number.
        assert_eq!(parse("", &["train.lr=1"]).unwrap().train.lr, 1.0);
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_and_the_line() {
        for (text, sets, says) in [
            ("[train]\n\nlearning_rat = 1", &[][..], "r.toml:3: unknown key `train.learning_rat`"),
            (
                "[train]\nttt_step = 1",
                &[],
                "r.toml:2: unknown key `train.ttt_step`; the nearest known one is `train.ttt_steps`",
            ),
            ("lr = 1", &[], "the nearest known one is `train.lr`"),
            ("[trian]\nlr = 1", &[], "r.toml:1: unknown key `trian`; the nearest known one is `train`"),
            ("", &["train.l=1"], "--set train.l=1: unknown key `train.l`; the nearest known one is `train.lr`"),
            ("", &["evaluate.kk=1"], "nearest known one is `evaluate.k`"),
            (
                "[capture]\n[[capture.class]]\nname = \"a\"\n\n[[capture.class]]\nmax_token = 1",
                &[],
                "r.toml:6: unknown key `capture.class.max_token`; the nearest known one is `capture.class.max_tokens`",
            ),
        ] {
            let error = parse(text, sets).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn wrong_values_are_refused_where_they_stand() {
        for (text, sets, says) in [
            ("[train]\nlr = \"fast\"", &[][..], "r.toml:2"),
            ("[train]\nttt_steps = 9", &[], "r.toml:2: `train.ttt_steps` is 9; it must be from 1 to 8"),
            ("[data]\non_bad = \"ignore\"", &[], "r.toml:2"),
            ("[train]\nlr = 1", &["train.lr=-1"], "--set train.lr=-1"),
            ("[train", &[], "r.toml:1"),
            ("[capture]\nengine = \"vllm\"", &[], "an engine that is not embedded needs the address"),
            ("[capture]\nconcurrency = \"many\"", &[], "r.toml:2"),
            ("", &["train.lr"], "key=value"),
            ("", &["train.epochs=many"], "--set train.epochs=many"),
        ] {
            let error = parse(text, sets).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_absent_keys_are_all_listed() {
        // A recipe with every optional key set has exactly the known keys.
        let full = "[target]\nfamily = \"f\"\nhub = \"h\"\npip = \"p\"\n[train]\ninit_from = \"d\"\n[capture]\n\
            api_key_env = \"K\"\napi_key_file = \"k\"\n[[capture.class]]\nmin_prompt_tokens = 1\nmax_prompt_tokens = 2\n\
            max_tokens = 3\ntemperature = 1\ntop_p = 1\ntop_k = 1\nsamples = 1\ntake = 1\nconcurrency = \"auto\"";
        let recipe = parse(full, &[]).unwrap();
        let Value::Table(table) = Value::try_from(&recipe).unwrap() else { panic!() };
        let count: usize = table.values().map(|section| section.as_table().unwrap().len()).sum();
        let class = table["capture"]["class"][0].as_table().unwrap().len();
        assert_eq!(count + class, known_keys().len());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,200}", set in ".{0,40}") {
            let _ = parse(&text, &[]);
            let _ = parse("", &[&set]);
        }
    }
}
