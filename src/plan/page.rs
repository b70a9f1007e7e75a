//! A plan as one HTML page: styles and SVG within, nothing fetched, light or dark as the reader's machine is.

use std::fmt::Write as _;

use super::Span;
use super::report::{Plan, between, bytes, tokens};
use crate::capture::status::hours;

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5d6878;--line:#d9dfe7;--back:#fff;--accent:#1f6feb;--warn:#b35900}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9f0;--soft:#98a4b4;--line:#333c48;--back:#14181e;--accent:#6aa8ff;
--warn:#f0a352}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:64rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
table{border-collapse:collapse;width:100%}.wide{overflow-x:auto}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th{color:var(--soft);font-weight:600}.l{text-align:left}.soft{color:var(--soft)}.warn{color:var(--warn)}
.big{font-size:1.9rem;font-weight:650}.facts{display:flex;flex-wrap:wrap;gap:1rem 3rem;margin:1rem 0}
svg{width:100%;height:auto}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.bar{fill:var(--accent)}.axis{stroke:var(--line)}.band{fill:var(--accent);opacity:.22}
.now{stroke:var(--ink);stroke-width:2;fill:none}.middle{stroke:var(--accent);stroke-width:2.5;fill:none}
";
/// Of the charts, in their own units.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 30.0;

/// The whole page.
pub fn html(plan: &Plan) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>eaglet plan</title><style>{STYLE}</style><body><h1>Capture plan</h1>\n"
    );
    page += "<div class=\"facts\">";
    let unknown = || "unknown".to_string();
    let range = |span: &Span, show: fn(f64) -> String| format!("{} to {}", show(span.low), show(span.high));
    fact(
        &mut page,
        "time left",
        &plan.hours.map_or_else(unknown, |h| hours(h.middle)),
        &plan.hours.map_or_else(unknown, |h| range(&h, hours)),
    );
    fact(&mut page, "output tokens in all", &tokens(plan.tokens.middle), &range(&plan.tokens, tokens));
    let rate = plan.tokens_per_s.map_or_else(unknown, |r| format!("{r:.0} tokens/s"));
    fact(&mut page, "answers", &format!("{} of {}", plan.done, plan.wanted), &rate);
    if let Some(disk) = &plan.disk {
        let each = format!("{} bytes a token", disk.bytes_per_token);
        fact(&mut page, "hidden states", &bytes(disk.bytes.middle), &each);
    }
    page += "</div>\n";
    for warning in &plan.warnings {
        let _ = writeln!(page, "<p class=\"warn\">Warning: {}</p>", escape(warning));
    }
    page += "<h2>When it is done</h2>\n";
    page += &fan(plan);
    page += "<h2>Lengths of answers</h2>\n";
    page += &histogram(&plan.lengths.histogram);
    page += "<h2>What would shorten it</h2>\n";
    page += &lever_table(plan);
    if let Some(left) = &plan.together {
        let _ = writeln!(
            page,
            "<p>What costs nothing, and the cap that cuts little, together: {} left.</p>",
            between(left, hours)
        );
    }
    if let Some(proposal) = &plan.budget {
        let _ = writeln!(page, "<h2>In the budget</h2><pre>{}</pre>", escape(&super::report::in_budget(proposal)));
    }
    page += "<h2>Datasets</h2>\n";
    page += &dataset_table(plan);
    page + "</body></html>\n"
}

fn fact(page: &mut String, name: &str, value: &str, more: &str) {
    let (value, more) = (escape(value), escape(more));
    let _ = write!(
        page,
        "<div><div class=\"soft\">{name}</div><div class=\"big\">{value}</div><div class=\"soft\">{more}</div></div>"
    );
}

/// Answers over hours: what was, and where the draws go from here. A draw's answers are taken to come evenly.
fn fan(plan: &Plan) -> String {
    let at = |share: f64| plan.draws.get(((plan.draws.len().max(1) - 1) as f64 * share).round() as usize).copied();
    let (Some(low), Some(early), Some(late), Some(high), Some(hours_left)) =
        (at(0.05), at(0.25), at(0.75), at(0.95), plan.hours)
    else {
        return "<p class=\"soft\">The rate is not known yet.</p>\n".into();
    };
    let past = plan.answers_per_min.map_or(0.0, |rate| plan.done as f64 / rate / 60.0);
    let end = (high * 1.05).max(1e-3);
    let x = |hour: f64| LEFT + (hour + past) / (end + past) * (WIDTH - LEFT - 20.0);
    let y = |answers: f64| HEIGHT - BOTTOM - answers / plan.wanted.max(1) as f64 * (HEIGHT - BOTTOM - 20.0);
    let (done, wanted) = (plan.done as f64, plan.wanted as f64);
    let mut svg = open("Answers captured over the hours to come");
    let step = tick(end);
    let mut hour = 0.0;
    while hour <= end {
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"20\" y2=\"{1:.1}\"/>\
             <text x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"middle\">{3}</text>",
            x(hour),
            HEIGHT - BOTTOM,
            HEIGHT - 10.0,
            if hour == 0.0 { "now".into() } else { hours(hour) }
        );
        hour += step;
    }
    for share in [0.0, 0.5, 1.0] {
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{0}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{4:.0}</text>",
            WIDTH - 20.0,
            y(wanted * share),
            LEFT - 8.0,
            y(wanted * share) + 4.0,
            wanted * share
        );
    }
    for (from, to) in [(low, high), (early, late)] {
        let _ = write!(
            svg,
            "<polygon class=\"band\" points=\"{:.1},{:.1} {:.1},{:.1} {:.1},{3:.1}\"/>",
            x(0.0),
            y(done),
            x(from),
            y(wanted),
            x(to),
        );
    }
    let mut stroke = |class: &str, from: (f64, f64), to: (f64, f64)| {
        let _ = write!(
            svg,
            "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            x(from.0),
            y(from.1),
            x(to.0),
            y(to.1)
        );
    };
    stroke("now", (-past, 0.0), (0.0, done));
    stroke("middle", (0.0, done), (hours_left.middle, wanted));
    svg + "</svg><p class=\"soft\">Line: the estimate. Bands: half and nine tenths of the forecast's draws.</p>\n"
}

/// A round step that gives some five to ten ticks.
fn tick(end: f64) -> f64 {
    let rough = end / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|&n| n >= rough).unwrap_or(rough)
}

fn histogram(counts: &[usize]) -> String {
    let first = counts.iter().position(|&n| n > 0).unwrap_or(0);
    let counts = &counts[first..];
    let most = counts.iter().copied().max().unwrap_or(0).max(1) as f64;
    let wide = (WIDTH - LEFT - 20.0) / counts.len().max(1) as f64;
    let mut svg = open("Answers by length");
    for (at, &count) in counts.iter().enumerate() {
        let left = LEFT + at as f64 * wide;
        let high = count as f64 / most * (HEIGHT - BOTTOM - 30.0);
        let _ = write!(
            svg,
            "<rect class=\"bar\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{high:.1}\"/>\
             <text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"middle\">{5}</text>\
             <text x=\"{3:.1}\" y=\"{6:.1}\" text-anchor=\"middle\">{count}</text>",
            left + 2.0,
            HEIGHT - BOTTOM - high,
            (wide - 4.0).max(1.0),
            left + wide / 2.0,
            HEIGHT - 10.0,
            1u64 << (first + at),
            HEIGHT - BOTTOM - high - 6.0,
        );
    }
    svg + "</svg><p class=\"soft\">Each bar: answers from so many tokens up to twice as many.</p>\n"
}

fn lever_table(plan: &Plan) -> String {
    if plan.levers.is_empty() {
        return "<p class=\"soft\">Nothing that is known of.</p>\n".into();
    }
    let mut table = String::from(
        "<div class=\"wide\"><table><tr><th class=\"l\">what<th>saves<th>left<th>tokens less<th class=\"l\">cost</tr>\n",
    );
    let shown = |span: &Option<Span>| span.as_ref().map_or("unknown".into(), |s| between(s, hours));
    for lever in &plan.levers {
        let _ = writeln!(
            table,
            "<tr><td class=\"l\"><b>{}</b><br>{}<td>{}<td>{}<td>{}<td class=\"l\">{}</tr>",
            escape(&lever.title),
            escape(&lever.act),
            shown(&lever.saves),
            shown(&lever.left),
            tokens(lever.saves_tokens),
            escape(&lever.cost)
        );
    }
    table + "</table></div>\n"
}

fn dataset_table(plan: &Plan) -> String {
    let mut table = String::from(
        "<div class=\"wide\"><table><tr><th class=\"l\">dataset<th>done<th>wanted<th>mean<th>expected<th>median\
         <th>deviation<th>p90<th>p99<th>at the cap<th>reasoning<th>tokens<th>left</tr>\n",
    );
    for group in &plan.groups {
        let l = &group.lengths;
        let _ = writeln!(
            table,
            "<tr><td class=\"l\">{}<td>{}<td>{}<td>{:.0}<td>{:.0}<td>{:.0}<td>{:.0}<td>{:.0}<td>{:.0}<td>{:.1}%\
             <td>{:.0}%<td>{}<td>{}</tr>",
            escape(&group.dataset),
            group.done,
            group.wanted,
            l.mean,
            group.expected,
            l.median,
            l.deviation,
            l.p90,
            l.p99,
            l.capped * 100.0,
            l.reasoned * 100.0,
            between(&group.tokens, tokens),
            group.hours.as_ref().map_or("unknown".into(), |h| between(h, hours))
        );
    }
    table + "</table></div>\n"
}

fn open(label: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{label}\">")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_the_page() {
        assert_eq!(escape("<script>\"a\"&b"), "&lt;script&gt;&quot;a&quot;&amp;b");
        assert_eq!((tick(55.0), tick(0.9), tick(6.0)), (10.0, 0.2, 1.0));
    }
}
