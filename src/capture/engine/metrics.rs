//! Prometheus text: the few lines a client needs.

/// The samples of one metric: labels as text, and the value.
pub fn samples<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            // Label values may hold braces and spaces; the value is what stands behind the last brace.
            Some(rest) => rest.rsplit_once('}')?,
            None if rest.starts_with(' ') => ("", rest),
            None => return None,
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some((labels, value))
    })
}

/// The sum over all label sets; `None` where the metric is absent.
pub fn sum(text: &str, name: &str) -> Option<f64> {
    samples(text, name).map(|(_, value)| value).fold(None, |sum, v| Some(sum.unwrap_or(0.0) + v))
}

/// The greatest over all label sets: for what every rank reports alike.
pub fn greatest(text: &str, name: &str) -> Option<f64> {
    samples(text, name).map(|(_, value)| value).fold(None, |most: Option<f64>, v| Some(most.map_or(v, |m| m.max(v))))
}

/// The value of one label.
pub fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let start = labels.find(&format!("{name}=\""))? + name.len() + 2;
    labels[start..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_behind_the_labels() {
        let text = "# HELP a b\na{x=\"1}\",y=\"z\"} 2.5\na{x=\"2\"} 1e1 1700000000\nab 7\na 0.5\nb NaN\n";
        assert_eq!(samples(text, "a").map(|s| s.1).collect::<Vec<_>>(), [2.5, 10.0, 0.5]);
        assert_eq!((sum(text, "a"), greatest(text, "a"), sum(text, "none")), (Some(13.0), Some(10.0), None));
        assert_eq!(label(samples(text, "a").next().unwrap().0, "y"), Some("z"));
    }
}
