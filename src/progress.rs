//! The progress bar of long work. Off a terminal it is hidden, and the loops log lines instead.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `length` units on standard error, in indicatif's template language.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
