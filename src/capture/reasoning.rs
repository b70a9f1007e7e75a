//! Whether an answer thought, by token id: text fields that an API moves elsewhere cannot hide it.

use super::{CaptureError, Segment};
use crate::recipe::{ReasoningRule, SegmentKind, Thinking};

/// Tokens that open and close stretches of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// Around reasoning.
    pub reasoning: Option<(u32, u32)>,
    /// Around calls of tools.
    pub tool_calls: Option<(u32, u32)>,
}

/// An answer cut by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// They tile the output.
    pub segments: Vec<Segment>,
    /// Reasoning was proved: its closing token is there, or the cap cut the answer while it was open.
    pub reasoned: bool,
}

/// Cuts an output into segments. The marks belong to the stretch they bound. Reasoning may be open from the start, where
/// the prompt's own last token opened it (Kimi-K2.5's prompts end with `<think>`).
pub fn cut(prompt: &[u32], output: &[u32], capped: bool, marks: &Marks) -> Cut {
    let opened = |pair: Option<(u32, u32)>| {
        let (open, close) = pair?;
        prompt.iter().rev().find(|&&id| id == open || id == close).filter(|&&id| id == open)
    };
    // The opening token is the last of the prompt, or only whitespace follows it: within four tokens.
    let near = |open: u32| prompt.iter().rev().take(4).any(|&id| id == open);
    let mut kind = match marks.reasoning {
        Some((open, _)) if opened(marks.reasoning).is_some() && near(open) => SegmentKind::Reasoning,
        _ => SegmentKind::Answer,
    };
    let mut segments: Vec<Segment> = Vec::new();
    let mut start = 0;
    let mut close = |segments: &mut Vec<Segment>, kind, end| {
        if end > start {
            segments.push(Segment { kind, start, end });
            start = end;
        }
    };
    let mut closed = false;
    for (at, &id) in output.iter().enumerate() {
        match marks.reasoning {
            Some((open, _)) if id == open && kind == SegmentKind::Answer => {
                close(&mut segments, kind, at);
                kind = SegmentKind::Reasoning;
                continue;
            }
            Some((_, end)) if id == end && kind == SegmentKind::Reasoning => {
                close(&mut segments, kind, at + 1);
                kind = SegmentKind::Answer;
                closed = true;
                continue;
            }
            _ => {}
        }
        match marks.tool_calls {
            // A tool section also ends reasoning that was never closed, as models sometimes leave it.
            Some((open, _)) if id == open => {
                close(&mut segments, kind, at);
                kind = SegmentKind::ToolCall;
            }
            Some((_, end)) if id == end && kind == SegmentKind::ToolCall => {
                close(&mut segments, kind, at + 1);
                kind = SegmentKind::Answer;
            }
            _ => {}
        }
    }
    close(&mut segments, kind, output.len());
    let open = kind == SegmentKind::Reasoning;
    Cut { reasoned: closed || (open && capped), segments }
}

/// Answers in a row without reasoning that stop a run which requires it.
const PATIENCE: usize = 16;

/// Holds a run to its rule on reasoning.
#[derive(Debug, Clone)]
pub struct Guard {
    rule: ReasoningRule,
    thinking: Thinking,
    known: bool,
    without: usize,
    /// Answers seen, and those that reasoned.
    pub seen: usize,
    pub reasoned: usize,
}

impl Guard {
    /// A guard of a fresh run. `known`: the tokens around reasoning are known.
    pub fn new(rule: ReasoningRule, thinking: Thinking, known: bool) -> Self {
        Self { rule, thinking, known, without: 0, seen: 0, reasoned: 0 }
    }

    /// Counts an answer.
    ///
    /// # Errors
    /// When the rule is broken, with the likely cure.
    pub fn see(&mut self, cut: &Cut, id: &str) -> Result<(), CaptureError> {
        self.seen += 1;
        self.reasoned += usize::from(cut.reasoned);
        self.without = if cut.reasoned { 0 } else { self.without + 1 };
        match self.rule {
            ReasoningRule::Required if self.without >= PATIENCE => {
                let cure = match (self.known, self.thinking) {
                    (false, _) => {
                        "no tokens around reasoning are known: name the model in target.family, or set \
                         capture.reasoning_tokens = [open, close]"
                    }
                    (true, Thinking::Off) => "capture.thinking is \"off\"; set it to \"on\"",
                    (true, Thinking::Default) => {
                        "the template may not ask for thinking: set capture.thinking = \"on\", and look at a prompt's \
                         last tokens in journal.jsonl"
                    }
                    (true, Thinking::On) => {
                        "does this model think? Look at a prompt's last tokens in journal.jsonl: its template may not \
                         know the switch"
                    }
                };
                Err(CaptureError::Reasoning(format!(
                    "the last {PATIENCE} answers carry no reasoning, {} of {} do in all, but capture.reasoning is \
                     \"required\"; {cure}",
                    self.reasoned, self.seen
                )))
            }
            ReasoningRule::Forbidden if cut.reasoned => Err(CaptureError::Reasoning(format!(
                "{id} carries reasoning, but capture.reasoning is \"forbidden\"; set capture.thinking = \"off\""
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SegmentKind::{Answer, Reasoning, ToolCall};
    use proptest::prelude::*;

    const MARKS: Marks = Marks { reasoning: Some((90, 91)), tool_calls: Some((80, 81)) };

    fn kinds(prompt: &[u32], output: &[u32], capped: bool) -> (Vec<(SegmentKind, usize)>, bool) {
        let cut = cut(prompt, output, capped, &MARKS);
        (cut.segments.iter().map(|s| (s.kind, s.end)).collect(), cut.reasoned)
    }

    #[test]
    fn segments_are_cut_by_id() {
        for (prompt, output, capped, segments, reasoned) in [
            // The model opens and closes by itself.
            (&[1][..], &[90, 5, 91, 6, 7][..], false, vec![(Reasoning, 3), (Answer, 5)], true),
            // The prompt opened it.
            (&[1, 90], &[5, 91, 6], false, vec![(Reasoning, 2), (Answer, 3)], true),
            (&[1, 90, 2], &[5, 91], false, vec![(Reasoning, 2)], true),
            // Cut while thinking: reasoning all through.
            (&[1, 90], &[5, 6], true, vec![(Reasoning, 2)], true),
            // It stopped without ever closing: unproved.
            (&[1, 90], &[5, 6], false, vec![(Reasoning, 2)], false),
            // Instant mode: the prompt opens and closes at once.
            (&[1, 90, 91], &[5, 6], false, vec![(Answer, 2)], false),
            // An opening far back is history's.
            (&[90, 1, 1, 1, 1, 1], &[5], false, vec![(Answer, 1)], false),
            (&[1], &[5, 80, 6, 81, 7], false, vec![(Answer, 1), (ToolCall, 4), (Answer, 5)], false),
            (&[1, 90], &[5, 80, 6, 81], false, vec![(Reasoning, 1), (ToolCall, 4)], false),
            (&[1], &[], false, vec![], false),
        ] {
            assert_eq!(kinds(prompt, output, capped), (segments, reasoned), "{prompt:?} {output:?}");
        }
    }

    proptest! {
        #[test]
        fn segments_tile(prompt in prop::collection::vec(78u32..93, 0..6), output in prop::collection::vec(78u32..93, 0..30), capped: bool) {
            let cut = cut(&prompt, &output, capped, &MARKS);
            let mut end = 0;
            for segment in &cut.segments {
                prop_assert!(segment.start == end && segment.end > end);
                end = segment.end;
            }
            prop_assert_eq!(end, output.len());
        }
    }

    #[test]
    fn a_run_without_reasoning_stops_after_sixteen() {
        let mut guard = Guard::new(ReasoningRule::Required, Thinking::Default, true);
        let (yes, no) = (Cut { segments: vec![], reasoned: true }, Cut { segments: vec![], reasoned: false });
        for i in 0..15 {
            guard.see(&no, &i.to_string()).unwrap();
        }
        guard.see(&yes, "saved").unwrap();
        for i in 0..15 {
            guard.see(&no, &i.to_string()).unwrap();
        }
        let error = guard.see(&no, "x").unwrap_err().to_string();
        assert!(error.contains("1 of 32 do in all") && error.contains("capture.thinking = \"on\""), "{error}");
        assert!(Guard::new(ReasoningRule::Forbidden, Thinking::Default, true).see(&yes, "x").is_err());
        assert!(Guard::new(ReasoningRule::Optional, Thinking::Default, true).see(&no, "x").is_ok());
    }
}
