//! Predictions beside measurements: one case, all cases, and the line for scripts.

use std::fmt;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use firebox::Bytes;
use serde_json::{Value, json};

use crate::cases::Case;
use crate::process::{Found, Left};

/// What the processes of a case found.
pub struct Compared {
    pub case: Case,
    /// At least one.
    pub found: Vec<Found>,
}

impl Compared {
    /// The least that any of the processes predicted. They should all predict the same.
    fn predicted(&self) -> Bytes {
        self.found.iter().map(|found| found.predicted).min().unwrap_or_default()
    }

    /// The most that any of the processes reserved.
    fn most(&self) -> Bytes {
        self.found.iter().map(|found| found.reserved).max().unwrap_or_default()
    }

    fn least(&self) -> Bytes {
        self.found.iter().map(|found| found.reserved).min().unwrap_or_default()
    }

    /// The prediction, relative to the most that was measured.
    pub fn ratio(&self) -> f64 {
        self.predicted().ratio(self.most())
    }

    /// The most that any of the processes took according to the driver, if all of them know.
    fn driver(&self) -> Option<Bytes> {
        let taken: Option<Vec<Bytes>> = self.found.iter().map(|found| found.driver).collect();
        taken?.into_iter().max()
    }

    /// The prediction, relative to that.
    fn driver_ratio(&self) -> Option<f64> {
        Some(self.predicted().ratio(self.driver()?))
    }

    fn is_exact(&self) -> bool {
        self.predicted() == self.most()
    }

    fn left(&self) -> impl Iterator<Item = Left> {
        self.found.iter().filter_map(|found| found.left)
    }

    /// Whether what is in use after a step was predicted to the byte, wherever it was measured.
    pub fn in_use_is_exact(&self) -> bool {
        self.left().count() > 0 && self.left().all(|left| left.predicted == left.measured)
    }

    fn row(&self) -> Vec<String> {
        let mark = |mark: bool, text: &str| if mark { text.to_owned() } else { String::new() };
        let in_use = match self.left().find(|left| left.predicted != left.measured) {
            None => mark(self.in_use_is_exact(), "="),
            Some(left) => format!("{} not {}", left.predicted, left.measured),
        };
        vec![
            self.case.to_string(),
            mark(self.case.cliff, "near"),
            self.predicted().to_string(),
            self.least().to_string(),
            self.most().to_string(),
            format!("{:.3}", self.ratio()),
            mark(self.is_exact(), "="),
            in_use,
            self.driver().map_or_else(|| "unknown".to_owned(), |driver| driver.to_string()),
        ]
    }

    fn json(&self) -> Value {
        let all = |bytes: fn(&Found) -> Bytes| -> Vec<u64> {
            self.found.iter().map(|found| bytes(found).get()).collect()
        };
        json!({
            "case": self.case.to_string(),
            "near_a_cliff": self.case.cliff,
            "predicted": all(|found| found.predicted),
            "reserved": all(|found| found.reserved),
            "driver": self.found.iter().map(|found| found.driver.map(Bytes::get)).collect::<Vec<_>>(),
            "in_use": self.left().map(|left| left.measured.get()).collect::<Vec<_>>(),
            "predicted_in_use": self.left().map(|left| left.predicted.get()).collect::<Vec<_>>(),
        })
    }
}

/// All cases of a run.
pub struct Comparison {
    pub target: String,
    /// At least one.
    pub cases: Vec<Compared>,
}

impl Comparison {
    /// The ratios of predicted to measured bytes, in order.
    fn ratios(&self) -> Vec<f64> {
        let mut ratios: Vec<f64> = self.cases.iter().map(Compared::ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }

    /// One row a case.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED);
        let columns = [
            "case",
            "cliff",
            "predicted",
            "least",
            "most",
            "ratio",
            "pages",
            "in use after a step",
            "most growth, driver",
        ];
        table.set_header(columns);
        table.add_rows(self.cases.iter().map(Compared::row));
        for (at, column) in table.column_iter_mut().enumerate() {
            if matches!(at, 2..=5 | 8) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// All numbers, in bytes.
    pub fn json(&self) -> Value {
        let cases: Vec<Value> = self.cases.iter().map(Compared::json).collect();
        json!({ "target": self.target, "result": self.to_string(), "cases": cases })
    }
}

/// The line for scripts.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratios = self.ratios();
        let exact = self.cases.iter().filter(|case| case.is_exact()).count();
        let middle = (ratios[(ratios.len() - 1) / 2] + ratios[ratios.len() / 2]) / 2.0;
        let (least, worst) = (ratios[0], ratios[ratios.len() - 1]);
        write!(
            f,
            "result: target={} cases={} median={middle:.3} worst={worst:.3} least={least:.3} exact_pages={exact}",
            self.target,
            ratios.len(),
        )?;
        let driver: Option<Vec<f64>> = self.cases.iter().map(Compared::driver_ratio).collect();
        let Some(driver) = driver else { return Ok(()) };
        let least = driver.iter().copied().fold(f64::INFINITY, f64::min);
        let worst = driver.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        write!(f, " driver_worst={worst:.3} driver_least={least:.3}")
    }
}
