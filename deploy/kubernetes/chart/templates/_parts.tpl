{{- define "splitserve.labels" -}}
app.kubernetes.io/name: splitserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Settings as flags. */}}
{{- define "splitserve.flags" -}}
{{- range $name, $value := . }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else }}
- {{ printf "--%s=%v" $flag (kindIs "float64" $value | ternary (toJson $value) $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "splitserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "splitserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "splitserve.env" -}}
- {name: HOME, value: /var/lib/splitserve}
- {name: TMPDIR, value: /tmp}
- {name: HF_HOME, value: /models/hub}
- {name: XDG_CACHE_HOME, value: /models/cache}
{{- end }}

{{- define "splitserve.volumes" -}}
- name: cluster-key
  secret: {secretName: {{ .Values.clusterKeySecret }}, defaultMode: 0440}
- {name: state, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- name: models
  {{- toYaml (.Values.model.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}

{{- define "splitserve.mounts" -}}
- {name: cluster-key, mountPath: /etc/splitserve/cluster, readOnly: true}
- {name: state, mountPath: /var/lib/splitserve}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models, readOnly: {{ hasPrefix "/" .Values.model.name }}}
{{- end }}

{{/* Fetches a model that is no folder. The coordinator needs no weights. */}}
{{- define "splitserve.fetch" -}}
{{- $values := .root.Values }}
- name: fetch-model
  image: {{ $values.image }}
  imagePullPolicy: {{ $values.imagePullPolicy }}
  securityContext: {{- include "splitserve.containerSecurity" .root | nindent 4 }}
  command:
    - python
    - -c
    - |
      import sys
      from splitserve.cli.model_source import resolved
      print(resolved(sys.argv[1], sys.argv[2], weights=sys.argv[3] == "weights"))
    - {{ $values.model.name | quote }}
    - {{ $values.model.revision | quote }}
    - {{ .what }}
  env: {{- include "splitserve.env" .root | nindent 4 }}
  {{- with $values.model.secretName }}
  envFrom: [{secretRef: {name: {{ . }}}}]
  {{- end }}
  volumeMounts: {{- include "splitserve.mounts" .root | nindent 4 }}
{{- end }}

{{- define "splitserve.modelFlags" -}}
- {{ printf "--model=%s" .Values.model.name | quote }}
{{- with .Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
- --key-file=/etc/splitserve/cluster/cluster.key
{{- end }}
