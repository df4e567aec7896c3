//! The results of the rounds: one row a round, in a file a part. Tables and plots are made from
//! these alone.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::numbers::{Spread, median};

/// The rows of a part.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    part: String,
    measures: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    at: At,
    contender: String,
    round: usize,
    values: Vec<f64>,
}

/// Under which circumstances a row was measured: in words, and a number (a pipeline's depth, how
/// many wait, …).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct At {
    pub(crate) case: String,
    pub(crate) size: u64,
}

pub(crate) fn at(case: &str, size: impl TryInto<u64>) -> At {
    At {
        case: case.to_owned(),
        size: size.try_into().unwrap_or(u64::MAX),
    }
}

impl Results {
    pub(crate) fn new(part: &str, measures: &[&str]) -> Self {
        Self {
            part: part.to_owned(),
            measures: measures.iter().copied().map(str::to_owned).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, its values in the order of the measures.
    pub(crate) fn add(&mut self, at: &At, contender: &str, round: usize, values: &[f64]) {
        assert_eq!(values.len(), self.measures.len(), "{at:?}");
        let words = format!("{}{contender}", at.case);
        assert!(!words.contains(','), "a comma ends a column: {words}");
        self.rows.push(Row {
            at: at.clone(),
            contender: contender.to_owned(),
            round,
            values: values.to_vec(),
        });
    }

    /// Where anything was measured, each once, in order of appearance.
    pub(crate) fn cases(&self) -> Vec<String> {
        each_once(self.rows.iter().map(|row| row.at.case.clone()))
    }

    /// The sizes at which a contender was measured, each once, in order of appearance.
    pub(crate) fn sizes(&self, case: &str) -> Vec<u64> {
        let sizes = self.rows.iter().filter(|row| row.at.case == case);
        each_once(sizes.map(|row| row.at.size))
    }

    /// The contenders there, in the order of the first round.
    pub(crate) fn contenders(&self, at: &At) -> Vec<String> {
        let rows = self.rows.iter().filter(|row| row.at == *at);
        each_once(rows.map(|row| row.contender.clone()))
    }

    /// One measure of a contender, round by round.
    pub(crate) fn values(&self, at: &At, contender: &str, measure: &str) -> Vec<f64> {
        let column = self.measures.iter().position(|name| name == measure);
        let column = column.unwrap_or_else(|| panic!("{} has no {measure}", self.part));
        let mut rows: Vec<&Row> = self.rows.iter().collect();
        rows.retain(|row| row.at == *at && row.contender == contender);
        rows.sort_by_key(|row| row.round);
        rows.iter().map(|row| row.values[column]).collect()
    }

    pub(crate) fn median(&self, at: &At, contender: &str, measure: &str) -> f64 {
        median(&self.values(at, contender, measure))
    }

    pub(crate) fn spread(&self, at: &At, contender: &str, measure: &str) -> Spread {
        Spread::of(&self.values(at, contender, measure))
    }

    /// How many times what `to` has `of` has, over rounds that were neighbours.
    pub(crate) fn ratio(&self, at: &At, measure: &str, of: &str, to: &str) -> Spread {
        let (of, to) = (self.values(at, of, measure), self.values(at, to, measure));
        Spread::of_ratios(&of, &to)
    }

    /// Writes `<part>.csv`.
    pub(crate) fn write(&self, folder: &Path) {
        let mut text = format!("case,size,contender,round,{}\n", self.measures.join(","));
        for row in &self.rows {
            let At { case, size } = &row.at;
            let _ = write!(text, "{case},{size},{},{}", row.contender, row.round);
            for value in &row.values {
                let _ = write!(text, ",{value}");
            }
            text.push('\n');
        }
        let file = folder.join(format!("{}.csv", self.part));
        fs::write(file, text).unwrap();
    }

    /// Reads a part's file; None if there is none.
    pub(crate) fn read(part: &str, folder: &Path) -> Option<Self> {
        let text = fs::read_to_string(folder.join(format!("{part}.csv"))).ok()?;
        let mut lines = text.lines();
        let measures: Vec<&str> = lines.next()?.split(',').skip(4).collect();
        let mut results = Self::new(part, &measures);
        for line in lines {
            let words: Vec<&str> = line.split(',').collect();
            let values: Vec<f64> = words[4..]
                .iter()
                .map(|word| word.parse().unwrap())
                .collect();
            let at = at(words[0], words[1].parse::<u64>().unwrap());
            results.add(&at, words[2], words[3].parse().unwrap(), &values);
        }
        Some(results)
    }
}

fn each_once<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut all, value| {
        if !all.contains(&value) {
            all.push(value);
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Results {
        let mut results = Results::new("some", &["speed", "cost"]);
        for (round, speed) in [10.0, 30.0, 20.0].into_iter().enumerate() {
            results.add(&at("alone", 16), "we", round, &[speed, 0.1]);
            results.add(&at("alone", 16), "they", round, &[speed * 2.0, f64::NAN]);
        }
        results.add(&at("alone", 1), "we", 0, &[1.0, 1.0]);
        results
    }

    #[test]
    fn what_was_written_is_read_again() {
        let folder = std::env::temp_dir().join(format!("rlock-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        some().write(&folder);
        let read = Results::read("some", &folder).unwrap();
        assert_eq!(Results::read("other", &folder), None);
        fs::remove_dir_all(&folder).unwrap();
        // NaN is not even itself.
        assert_eq!(format!("{read:?}"), format!("{:?}", some()));
    }

    #[test]
    fn rows_are_found_by_where_they_were_measured() {
        let results = some();
        let there = at("alone", 16);
        assert_eq!(results.cases(), ["alone"]);
        assert_eq!(results.sizes("alone"), [16, 1]);
        assert_eq!(results.contenders(&there), ["we", "they"]);
        assert_eq!(results.values(&there, "we", "speed"), [10.0, 30.0, 20.0]);
        assert_eq!(results.median(&there, "they", "speed"), 40.0);
        assert_eq!(results.ratio(&there, "speed", "we", "they").largest, 0.5);
    }
}
