//! The pictures: bars side by side, and lines over a size. Text in, SVG out.

use std::ops::Range;

use plotters::prelude::*;

use crate::numbers::{Spread, count};

const SIZE: (u32, u32) = (900, 480);
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(110, 110, 110),
];

/// Bars in groups, each with a line from the least to the largest of its rounds.
pub(crate) struct Bars {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// The factor of the values.
    pub(crate) scale: f64,
    pub(crate) groups: Vec<Group>,
}

pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) bars: Vec<(String, Spread)>,
}

impl Bars {
    pub(crate) fn draw(&self) -> String {
        let mut svg = String::new();
        self.draw_into(&mut svg).unwrap();
        svg
    }

    fn draw_into(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let top = bars.map(|(_, spread)| spread.largest).fold(0.0, f64::max);
        let top = if top > 0.0 {
            top * self.scale * 1.3
        } else {
            1.0
        };
        let names: Vec<&str> = self
            .groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        let mut chart = ChartBuilder::on(&area)
            .caption(self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(32)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..names.len() as f64, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .light_line_style(WHITE)
            .y_desc(self.unit)
            .y_label_formatter(&|value| round(*value))
            .draw()?;
        let members = self.groups.iter().map(|group| group.bars.len()).max();
        let width = 0.8 / members.unwrap_or(1).max(1) as f64;
        for member in 0..members.unwrap_or(0) {
            let color = COLORS[member % COLORS.len()];
            let of_all = self.groups.iter().enumerate().filter_map(|(group, all)| {
                let (_, spread) = all.bars.get(member)?;
                Some((group as f64 + 0.1 + member as f64 * width, spread))
            });
            let of_all: Vec<_> = of_all
                .filter(|(_, spread)| !spread.median.is_nan())
                .collect();
            let name = self.groups.iter().find_map(|group| group.bars.get(member));
            let boxes = of_all.iter().map(|(left, spread)| {
                let corners = [
                    (*left, 0.0),
                    (left + width * 0.9, spread.median * self.scale),
                ];
                Rectangle::new(corners, color.filled())
            });
            chart
                .draw_series(boxes)?
                .label(name.map_or("", |(name, _)| name))
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled())
                });
            chart.draw_series(of_all.iter().map(|(left, spread)| {
                let middle = left + width * 0.45;
                let ends = [spread.least, spread.largest].map(|y| (middle, y * self.scale));
                PathElement::new(ends.to_vec(), BLACK)
            }))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.2))
            .label_font(("sans-serif", 13))
            .draw()?;
        self.name_groups(&area, &chart.plotting_area().get_pixel_range().0)?;
        area.present()?;
        Ok(())
    }

    /// The groups' names under their middles.
    fn name_groups<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, plotters::coord::Shift>,
        pixels: &Range<i32>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        let style = ("sans-serif", 14).into_text_style(area);
        let width = f64::from(pixels.end - pixels.start) / self.groups.len().max(1) as f64;
        for (index, group) in self.groups.iter().enumerate() {
            let (text, _) = area.estimate_text_size(&group.name, &style)?;
            let middle = f64::from(pixels.start) + width * (index as f64 + 0.5);
            #[allow(clippy::cast_possible_truncation, reason = "pixels")]
            let left = middle as i32 - i32::try_from(text / 2).unwrap_or(0);
            let bottom = i32::try_from(SIZE.1).unwrap_or(0) - 32;
            area.draw_text(&group.name, &style, (left, bottom))?;
        }
        Ok(())
    }
}

/// Lines over a size; both grow by factors.
pub(crate) struct Lines {
    pub(crate) title: &'static str,
    pub(crate) over: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) curves: Vec<(String, Vec<(u64, f64)>)>,
}

impl Lines {
    pub(crate) fn draw(&self) -> String {
        let mut svg = String::new();
        self.draw_into(&mut svg).unwrap();
        svg
    }

    fn draw_into(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(self.title, ("sans-serif", 20))
            .margin(12)
            .margin_right(40)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(self.sizes().log_scale(), self.values().log_scale())?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(self.over)
            .y_desc(if self.is_time() { "" } else { self.unit })
            .x_label_formatter(&|value| whole(*value))
            .y_label_formatter(&|value| self.label(*value))
            .draw()?;
        for ((name, curve), color) in self.curves.iter().zip(COLORS.iter().cycle()) {
            let points = curve.iter().map(|(size, value)| (*size as f64, *value));
            let points: Vec<_> = points.collect();
            chart
                .draw_series(LineSeries::new(
                    points.iter().copied(),
                    color.stroke_width(2),
                ))?
                .label(name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 14, y)], color.stroke_width(3)));
            let marks = points.iter();
            let marks = marks.map(|point| Circle::new(*point, 3, color.filled()));
            chart.draw_series(marks)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.2))
            .label_font(("sans-serif", 13))
            .draw()?;
        area.present()?;
        Ok(())
    }

    fn is_time(&self) -> bool {
        self.unit == "µs"
    }

    /// A label of the vertical axis: a time with its own unit, else a number with its thousands
    /// apart.
    fn label(&self, value: f64) -> String {
        match value {
            micros if self.is_time() && micros >= 1e6 => format!("{} s", micros / 1e6),
            micros if self.is_time() && micros >= 1e3 => format!("{} ms", micros / 1e3),
            micros if self.is_time() => format!("{micros} µs"),
            many if many >= 100.0 => whole(many),
            few => round(few),
        }
    }

    fn sizes(&self) -> Range<f64> {
        let points = self.curves.iter().flat_map(|(_, curve)| curve);
        let sizes: Vec<f64> = points.map(|point| point.0 as f64).collect();
        let (least, largest) = ends(&sizes);
        least..largest * 1.05
    }

    /// With room above for the names.
    fn values(&self) -> Range<f64> {
        let points = self.curves.iter().flat_map(|(_, curve)| curve);
        let values: Vec<f64> = points.map(|point| point.1).collect();
        let (least, largest) = ends(&values);
        let room = (largest / least).sqrt().max(2.0) * 1.5;
        least / 1.5..largest * room
    }
}

/// A label of an axis, which stands at a round number: without zeros behind the point.
fn round(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The least and the largest value that a logarithmic axis can show.
fn ends(values: &[f64]) -> (f64, f64) {
    let positive = || values.iter().copied().filter(|value| *value > 0.0);
    let largest = positive().fold(0.0, f64::max);
    match positive().fold(largest, f64::min) {
        least if least > 0.0 => (least, largest),
        _ => (1.0, 10.0),
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a label of an axis of sizes"
)]
fn whole(value: f64) -> String {
    count(value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_name_their_groups_and_members() {
        let bar = |name: &str, value| (name.to_owned(), Spread::of(&[value, value * 2.0]));
        let bars = Bars {
            title: "Speeds",
            unit: "a second",
            scale: 1.0,
            groups: vec![Group {
                name: "all alone".to_owned(),
                bars: vec![bar("we", 2.0), bar("they", f64::NAN)],
            }],
        };
        let svg = bars.draw();
        for word in ["Speeds", "a second", "all alone", "we", "they"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
    }

    #[test]
    fn a_line_of_one_point_is_drawn_too_and_one_of_none() {
        for curve in [vec![(1000, 2.0)], vec![]] {
            let lines = Lines {
                title: "Growth",
                over: "locks",
                unit: "µs",
                curves: vec![("we".to_owned(), curve)],
            };
            assert!(lines.draw().contains("Growth"));
        }
    }

    #[test]
    fn times_are_labelled_with_their_units_and_counts_with_their_thousands_apart() {
        let lines = |unit| Lines {
            title: "",
            over: "",
            unit,
            curves: vec![],
        };
        let labels = [10.0, 1e4, 1e7].map(|micros| lines("µs").label(micros));
        assert_eq!(labels, ["10 µs", "10 ms", "10 s"]);
        let labels = [0.5, 12.0, 1e5].map(|count| lines("a second").label(count));
        assert_eq!(labels, ["0.5", "12", &count(100_000)]);
    }
}
